"""The direct path between processes: bytes from one's pages through nvme into another's, and death on the
way."""

import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvtier.appliance.gpu import page_service as direct
from kvtier.appliance.gpu import runtime_events
from kvtier.clients import Client, Tier
from kvtier.clients.errors import InvalidRequest, KvtierError
from kvtier.tiers.cold.segment_files import segment_path
from tests.fakes.gpu.device import FakeDevice

from .direct_scene import IDENTITY, NUM_PAGES, NUM_STREAMS, WAIT_S, Runtime, Served, names, runtime_at
from .scene import repository


class Child:
    """A runtime in another process; see direct_runtime.py."""

    def __init__(self, target: str) -> None:
        command = [sys.executable, "-m", "tests.e2e.direct_runtime", target]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, cwd=repository(), stdin=pipe, stdout=pipe, text=True)
        assert self.hear() == "ready"

    def hear(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def ask(self, *words: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join(words) + "\n")
        self.process.stdin.flush()
        return self.hear()

    def end(self) -> None:
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None
        assert stdout is not None
        if self.process.poll() is None:
            stdin.write("quit\n")
        stdin.close()
        assert self.process.wait(WAIT_S) in (0, -signal.SIGKILL)
        stdout.close()


@contextmanager
def child_at(target: str) -> Iterator[Child]:
    child = Child(target)
    try:
        yield child
    finally:
        child.end()


def text(ids: list[int]) -> str:
    return ",".join(map(str, ids))


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with Served(tmp_path) as running:
        yield running
        running.assert_at_rest()


@pytest.fixture
def stalled(tmp_path: Path) -> Iterator[Served]:
    with Served(tmp_path, device=FakeDevice(num_streams=NUM_STREAMS, seed=3)) as running:
        yield running
        running.assert_at_rest()


def test_from_one_process_s_pages_over_nvme_into_another_one_s(tmp_path: Path) -> None:
    rng = random.Random(3)
    with Served(tmp_path, nvme=True) as served, child_at(served.target) as child:
        ids, others = rng.sample(range(NUM_PAGES), 12), rng.sample(range(NUM_PAGES), 12)
        child.ask("fill", "77")
        assert child.ask("put", "chain", text(ids)) == "12"
        stored = child.ask("read", text(ids))
        child.ask("archive", "chain")
        served.evict()
        with runtime_at(served.target, num_event_sets=1) as here:
            found = here.client.lookup(here.namespace, names("chain", 12))
            assert {tier.label for tier in found.tiers} == {"nvme"}
            before = here.whole.copy()
            with here.pages.begin_get(
                here.namespace, names("chain", 12), others, load_anyway=True
            ) as delivery:
                assert [group.group for group in delivery] == [0, 1, 2, 3]
                assert delivery.wait().num_loaded == 12
            untouched = [page for page in range(NUM_PAGES) if page not in others]
            assert (here.whole[:, untouched] == before[:, untouched]).all()
            here.pages.put(here.namespace, names("copy", 12), others)
        assert child.ask("get", "copy", text(others)) == "12 12"
        assert child.ask("read", text(others)) == stored


def test_from_the_hot_tier_straight_into_pages(tmp_path: Path) -> None:
    """What is in the device's own memory does not pass the host, and may be nowhere else."""
    with Served(tmp_path, nvme=True) as served, runtime_at(served.target) as one:
        one.fill(4)
        ids, others = list(range(12)), list(range(12, 24))
        chain = names("chain", 12)
        one.pages.put(one.namespace, chain, ids)
        assert one.client.prefetch(one.namespace, chain, Tier.HBM).num_promoted == 12
        served.evict()
        engines = served.daemon.appliance.engines
        before = {tier: engine.statistics().read_bytes for tier, engine in engines.items()}
        report = one.pages.get(one.namespace, chain, others)
        assert (report.num_loaded, set(report.tiers)) == (12, {Tier.HBM})
        assert one.read(others) == one.read(ids)
        assert {tier: engine.statistics().read_bytes for tier, engine in engines.items()} == before
        half = one.client.prefetch(one.namespace, chain[:6], Tier.DRAM)
        assert half.num_blocks == 6
        one.whole[:, others] = 0
        assert one.pages.get(one.namespace, chain, others).num_loaded == 12
        assert one.read(others) == one.read(ids)


def test_a_load_that_fails_shortens_what_is_promised(tmp_path: Path) -> None:
    """One record in nvme is damaged: the blocks before it come, those from it on are not promised."""
    with Served(tmp_path, nvme=True) as served:
        with runtime_at(served.target) as one:
            one.fill(1)
            ids = list(range(12))
            one.pages.put(one.namespace, names("chain", 12), ids, session="s")
            one.client.session("s").end(archive=True)
            served.evict()
            damage(tmp_path / "nvme", one.whole[2, 7].tobytes())  # layer 2 of block 7
            kept = one.read(ids)
            one.whole[:] = 0
            report = one.pages.get(one.namespace, names("chain", 12), ids, load_anyway=True)
            assert report.num_blocks == 7
            assert one.read(ids[:7]) == kept[: len(kept) * 7 // 12]
        served.assert_at_rest()


def damage(folder: Path, payload: bytes) -> None:
    """Flip a bit of a record whose payload begins with the K of `payload`'s first token."""
    rows = payload[:32]  # head 0 of token 0: the K; the record has tokens of one plane after another
    for number in range(32):
        path = segment_path(folder, number)
        if path.exists() and (offset := path.read_bytes().find(rows)) >= 0:
            with path.open("r+b") as file:
                file.seek(offset)
                file.write(bytes([rows[0] ^ 1]))
            return
    raise AssertionError("the record was not found")


@pytest.mark.parametrize("call", ["get&", "put&"])
def test_a_runtime_killed_while_its_pages_are_copied(stalled: Served, call: str) -> None:
    """Its memory stays mapped and what the copies read stays held until the device is done, then all goes
    back."""
    child = Child(stalled.target)
    child.ask("fill", "5")
    with Client(stalled.target) as client:
        namespace = client.register(IDENTITY)
        data = bytes(range(256)) * (8 * namespace.block_bytes // 256)
        client.put(namespace, names("stored", 8), data)
        assert child.ask(call, "stored" if call == "get&" else "new", text(list(range(8)))) == "begun"
        stalled.until(lambda: stalled.has_copies)
        child.process.send_signal(signal.SIGKILL)
        child.process.wait(WAIT_S)
        stalled.until(lambda: stalled.daemon.direct._registrations[0].is_ending)
        assert stalled.opened() == 1
        assert stalled.thread.call(stalled.num_leases) == (1 if call == "get&" else 0)
        stalled.evict(at_rest=False)
        stalled.assert_at_rest()
        assert client.get(namespace, names("new", 8)).num_loaded == (0 if call == "get&" else 8)
    child.end()


def test_a_runtime_that_leaves_before_its_event(stalled: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its event never happens, as that of a killed one; its get touches nothing, and everything goes back."""
    monkeypatch.setattr(runtime_events, "EVENT_S", 10 * WAIT_S)  # the end of its connection is enough
    with runtime_at(stalled.target) as other:
        other.fill(1)
        stalled.let_finish(other.start(other.pages.put, other.namespace, names("a", 4), [0, 1, 2, 3]))
        stuck = Runtime(stalled.target, is_live=False, num_events=1)
        event = stuck.pages.events[0]
        stuck.kernel(2, event)
        get = stuck.start(
            stuck.pages.get, stuck.namespace, names("a", 4), [4, 5, 6, 7], after=event, deadline_s=1.0
        )
        assert get.exception(WAIT_S) is not None  # gave up, and with it the connection
        stalled.pump(lambda: stalled.opened() == 1)
        assert not event.is_done()
        assert stalled.thread.call(stalled.num_leases) == 0
        again = other.start(other.pages.get, other.namespace, names("a", 4), [4, 5, 6, 7])
        assert stalled.let_finish(again).num_loaded == 4
        stuck.client.close()
        stuck.device.shut_down()


def test_a_runtime_that_lives_and_whose_event_does_not_happen(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its calls end with a reason, and its pages are untouched; when the event comes it is served again."""
    monkeypatch.setattr(runtime_events, "EVENT_S", 0.01)
    with runtime_at(served.target) as other, runtime_at(served.target, is_live=False, num_events=1) as stuck:
        other.fill(1)
        other.pages.put(other.namespace, names("a", 4), [0, 1, 2, 3])
        before, event = stuck.whole.copy(), stuck.pages.events[0]
        stuck.kernel(2, event)
        report = stuck.pages.get(stuck.namespace, names("a", 4), [4, 5, 6, 7], after=event)
        assert (report.num_loaded, report.reason) == (0, "event_late")
        with pytest.raises(InvalidRequest, match="has not happened within"):
            stuck.pages.put(stuck.namespace, names("b", 4), [4, 5, 6, 7], after=event)
        assert (stuck.whole == before).all()
        assert other.pages.get(other.namespace, names("a", 4), [4, 5, 6, 7]).num_loaded == 4
        assert served.count("direct_gets_event_late") == served.count("direct_puts_event_late") == 1
        stuck.device.run()
        assert stuck.pages.get(stuck.namespace, names("a", 4), [4, 5, 6, 7], after=event).num_loaded == 4
        assert stuck.read([4, 5, 6, 7]) == other.read([0, 1, 2, 3])


def test_closing_one_runtimes_memory_keeps_nobody_waiting(tmp_path: Path) -> None:
    """Closing waits for the device, which somebody keeps busy; gets and registrations go on."""
    device = FakeDevice(is_live=True, num_streams=NUM_STREAMS, seed=1, may_wait_abroad=True)
    with Served(tmp_path, device=device) as served, runtime_at(served.target) as one:
        one.fill(1)
        one.pages.put(one.namespace, names("a", 4), [0, 1, 2, 3])
        leaving, elsewhere, busy = Runtime(served.target), FakeDevice(5), device.take_stream()
        event, handle = elsewhere.export_event()
        stream = elsewhere.take_stream()
        stream.record(event)
        opened = device.open_event(handle)
        busy.wait(opened)
        ended = leaving.start(leaving.close)
        served.until(lambda: len(served.daemon.direct._registrations) == 1)
        assert one.pages.get(one.namespace, names("a", 4), [4, 5, 6, 7]).num_loaded == 4
        newcomer = Runtime(served.target)
        assert newcomer.pages.get(newcomer.namespace, names("a", 4), [4, 5, 6, 7]).num_loaded == 4
        assert not ended.done()
        elsewhere.run()
        ended.result(WAIT_S)
        newcomer.close()
        device.recycle(opened)
        device.give_stream(busy)
        elsewhere.shut_down()


def test_a_registration_that_fails_takes_no_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def defect(device: object) -> None:
        raise RuntimeError("a defect while kernels are loaded")

    monkeypatch.setattr(direct, "load", defect)
    device = FakeDevice(is_live=True, num_streams=NUM_STREAMS)
    with Served(tmp_path, device=device) as served:
        free = len(device._free_streams)
        for _ in range(2):
            with pytest.raises(KvtierError):
                Runtime(served.target)
        assert len(device._free_streams) == free
        assert served.opened() == 0


def test_ids_in_random_order_over_many_gets(tmp_path: Path) -> None:
    rng = random.Random(5)
    with Served(tmp_path) as served, runtime_at(served.target) as one:
        for turn in range(12):
            one.fill(turn)
            number = rng.randrange(1, 9)
            ids = rng.sample(range(NUM_PAGES), 2 * number)
            chain = names(f"turn {turn}", number)
            assert one.pages.put(one.namespace, chain, ids[:number]).complete
            assert one.pages.get(one.namespace, chain, ids[number:]).num_loaded == number
            assert one.read(ids[:number]) == one.read(ids[number:])
