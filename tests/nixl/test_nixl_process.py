"""NIXL's process: writes arrive, and what a peer may do to it ends in an error. The real library."""

import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from signal import SIGCONT, SIGKILL, SIGSTOP

import numpy as np
import pytest

from kvtier.sources.peers.nixl_process import MAX_QUARANTINED, NUM_SLOTS, SLOT_BYTES, SlotMemory

from ..waiting import until
from .writer import Writer, noise

SIZE = 8 << 20


@pytest.fixture
def ends() -> Iterator[tuple[Writer, Writer]]:
    """Return (holder, fetcher)."""
    holder, fetcher = Writer(), Writer()
    yield holder, fetcher
    holder.close()
    fetcher.close()


def test_what_is_written_lands_where_it_is_expected_and_nowhere_else(ends: tuple[Writer, Writer]) -> None:
    holder, fetcher = ends
    there = fetcher.process
    slots = [fetcher.call(there.landing.take) for _ in range(NUM_SLOTS)]
    assert fetcher.call(there.landing.take) is None
    for number, slot in enumerate(slots):
        assert slot is not None
        expected = fetcher.call(there.expect)
        payload = noise(number, SIZE - number)
        assert holder.write(there.metadata, there.address + slot, payload) == ""
        fetcher.call(there.end, expected)
        landed = fetcher.landed(slot)
        assert landed[: len(payload)].tobytes() == payload
        assert not landed[len(payload) :].any()


def test_a_write_that_was_given_up_arrives_later_and_only_where_nothing_is_read_any_more(
    ends: tuple[Writer, Writer],
) -> None:
    """The danger of a stopped peer: its bytes come when they are forgotten."""
    holder, fetcher = ends
    there = fetcher.process
    fetcher.call(there.expect)
    assert holder.write(there.metadata, there.address + SLOT_BYTES, noise(1, SIZE)) == ""
    slot = fetcher.call(there.landing.take)
    assert slot is not None
    os.kill(holder.process.pid, SIGSTOP)
    try:
        problem = holder.write(there.metadata, there.address + slot, noise(2, SIZE), within_s=0.2)
        assert problem.startswith("ConnectionLost")
        assert (
            holder.process.outgoing.num_quarantined == 1
        )  # what it was to be sent from is not used again either
        fetcher.run(quarantine(fetcher, slot))
    finally:
        os.kill(holder.process.pid, SIGCONT)
    until(lambda: bool(fetcher.landed(slot)[:SIZE].any()))  # so it was late, and it came
    others = [fetcher.call(there.landing.take) for _ in range(NUM_SLOTS)]
    assert slot not in others
    assert others.count(None) == 1


async def quarantine(fetcher: Writer, slot: int) -> None:
    fetcher.process.give_back(fetcher.process.landing, slot, in_doubt=True)


def test_a_process_with_too_many_slots_in_quarantine_ends(ends: tuple[Writer, Writer]) -> None:
    holder, fetcher = ends
    for _ in range(MAX_QUARANTINED):
        slot = fetcher.call(fetcher.process.landing.take)
        assert slot is not None
        fetcher.run(quarantine(fetcher, slot))
    assert fetcher.process.ended.is_set()
    problem = holder.write(fetcher.process.metadata, fetcher.process.address, noise(1, SIZE), within_s=5.0)
    assert problem  # with the process its memory has gone
    assert not fetcher.landed()[:SIZE].any()


@pytest.mark.parametrize(
    ("offset", "num_bytes"),
    [(NUM_SLOTS * SLOT_BYTES, 4096), (-4096, 4096), (NUM_SLOTS * SLOT_BYTES - 2048, 4096)],
)
def test_a_write_beyond_what_was_told_is_refused(
    ends: tuple[Writer, Writer], offset: int, num_bytes: int
) -> None:
    holder, fetcher = ends
    there = fetcher.process
    assert holder.write(there.metadata, there.address + offset, noise(1, num_bytes)).startswith("NotBegun")
    assert not there.ended.is_set()
    assert holder.process.outgoing.num_quarantined == 0


@pytest.mark.parametrize("what", ["nothing", "noise", "half", "zeros", "own"])
def test_metadata_that_makes_no_sense_is_refused(ends: tuple[Writer, Writer], what: str) -> None:
    holder, fetcher = ends
    told = fetcher.process.metadata
    metadata = {
        "nothing": b"",
        "noise": noise(1, 400),
        "half": told[: len(told) // 2],
        "zeros": bytes(len(told)),
        "own": holder.process.metadata,
    }[what]
    address = holder.process.address if what == "own" else fetcher.process.address
    assert holder.write(metadata, address, noise(1, 4096), within_s=5.0)
    assert not fetcher.landed()[:4096].any()


def test_forged_metadata_reaches_this_process_of_nothing_and_no_other(ends: tuple[Writer, Writer]) -> None:
    """Over TCP the owner checks nothing: its heap is overwritten. That may end it, and only it."""
    holder, fetcher = ends
    there, pid = fetcher.process, fetcher.process.pid
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    heap = int(next(line for line in maps if "[heap]" in line).partition("-")[0], 16)
    forged = there.metadata.replace(there.address.to_bytes(8, "little"), heap.to_bytes(8, "little"))
    assert forged != there.metadata
    fetcher.call(there.expect)
    holder.write(forged, heap, bytes(1 << 20), within_s=5.0)
    until(there.ended.is_set)
    assert not fetcher.landed()[:SIZE].any()


def test_a_process_that_is_killed_is_an_error_at_both_ends(ends: tuple[Writer, Writer]) -> None:
    holder, fetcher = ends
    there = fetcher.process
    expected = fetcher.call(there.expect)
    assert holder.write(there.metadata, there.address, noise(1, SIZE)) == ""  # they are connected from now on
    fetcher.call(there.end, expected)
    with ThreadPoolExecutor() as pool:
        os.kill(there.pid, SIGSTOP)
        writing = pool.submit(holder.write, there.metadata, there.address, noise(1, SIZE), 60.0)
        os.kill(there.pid, SIGKILL)
        assert writing.result(30.0)  # long before its time is over
    until(there.ended.is_set)
    os.kill(holder.process.pid, SIGKILL)
    until(holder.process.ended.is_set)
    assert holder.write(there.metadata, there.address, noise(1, SIZE)).startswith("NotBegun")


def test_it_has_nothing_of_its_parents(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVTIER_SECRET", "key")
    with socket.socket() as inherited, (tmp_path / "keys").open("wb") as keys:
        inherited.set_inheritable(True)
        os.set_inheritable(keys.fileno(), True)
        writer = Writer()
        try:
            folder = Path(f"/proc/{writer.process.pid}")
            assert b"KVTIER" not in (folder / "environ").read_bytes()
            files = [os.readlink(one) for one in (folder / "fd").iterdir()]
            assert str(tmp_path / "keys") not in files
            assert os.readlink(f"/proc/self/fd/{inherited.fileno()}") not in files
            allowed = ("/memfd:kvtier", "socket:", "pipe:", "anon_inode:", "/dev/null")
            assert [one for one in files if not one.startswith(allowed)] == []
            assert "NoNewPrivs:\t1" in (folder / "status").read_text()
        finally:
            writer.close()


def test_slots_in_quarantine_are_not_lent_again() -> None:
    memory = SlotMemory("test")
    first, second = memory.take(), memory.take()
    assert first is not None
    assert second is not None
    memory.give_back(first, in_doubt=True)
    memory.give_back(second, in_doubt=False)
    lent = [memory.take() for _ in range(NUM_SLOTS)]
    assert first not in lent
    assert second in lent
    np.testing.assert_array_equal(np.frombuffer(memory.view(second, 8), np.uint8), 0)
    memory.close()
