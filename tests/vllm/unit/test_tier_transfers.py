"""Store, load and probe between rows of a pool and an appliance, without vLLM."""

import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from kvtier.clients import Client, NamespaceIdentity, Overloaded
from kvtier.clients.connector import chain_store
from kvtier.clients.connector.breaker import Breaker
from kvtier.clients.connector.chain_store import ChainStore
from kvtier.clients.connector.guard import BREAKER_OPEN, Guard
from kvtier.clients.connector.opaque import opaque_geometry
from kvtier.clients.memory.buffers import address_of
from kvtier.clients.memory.extents import U8
from kvtier.clients.vllm_tier.runs import Run
from kvtier.clients.vllm_tier.transfers import PrimaryPool, TierJob, TierTransfers
from kvtier.testing import FakeAppliance

from ...daemon import Daemon

ROW_BYTES = 16 << 10
NUM_ROWS = 40
WEIGHTS = b"w" * 32


def identity(group: int, epoch: str = "") -> NamespaceIdentity:
    return NamespaceIdentity(WEIGHTS, opaque_geometry(ROW_BYTES, 32, f"test{epoch}"), shard=f"group={group}")


def key(number: int, group: int = 0) -> bytes:
    return number.to_bytes(32, "big") + group.to_bytes(4, "big")


def run(numbers: Sequence[int], rows: Sequence[int], group: int = 0, parent: int | None = None) -> Run:
    before = b"" if parent is None else parent.to_bytes(32, "big")
    return Run(group, tuple(key(n, group) for n in numbers), tuple(rows), before)


def is_ascending(asked: Sequence[bytes]) -> bool:
    return False


def is_descending(asked: Sequence[bytes]) -> bool:
    return True


def pool(seed: int = 1) -> U8:
    return np.random.default_rng(seed).integers(0, 256, (NUM_ROWS, ROW_BYTES), np.uint8)


KEPT: list[U8] = []  # a PrimaryPool does not keep its memory


def pool_of(rows: U8) -> PrimaryPool:
    KEPT.append(rows)
    return PrimaryPool(address_of(rows), *rows.shape)


def transfers_of(client: Client, rows: U8, **guard: Any) -> TierTransfers:
    return TierTransfers(ChainStore(client, Guard("test", **guard), 60.0), identity, pool_of(rows))


@pytest.fixture
def appliance() -> FakeAppliance:
    return FakeAppliance(64 * ROW_BYTES)


def test_what_is_stored_comes_back_into_other_rows(appliance: FakeAppliance) -> None:
    rows, empty = pool(), np.zeros((NUM_ROWS, ROW_BYTES), np.uint8)
    with appliance.client() as client:
        moving = transfers_of(client, rows)
        done = moving.store(TierJob(7, (run(range(5), (9, 3, 11, 0, 7)), run((2, 3), (20, 21), group=1))))
        assert (done.is_complete, done.num_bytes) == (True, 7 * ROW_BYTES)
        assert done.keys == (*(key(n) for n in range(5)), key(2, 1), key(3, 1))
        back = transfers_of(client, empty)
        done = back.load(TierJob(8, (run((0, 1, 2), (30, 31, 32)), run((2,), (33,), group=1))))
        assert done.is_complete
        assert np.array_equal(empty[[30, 31, 32, 33]], rows[[9, 3, 11, 20]])
        assert not empty[:30].any()  # nothing else was touched
    assert appliance.check_integrity() == []


def test_what_is_there_does_not_travel_again(appliance: FakeAppliance) -> None:
    with appliance.client() as client:
        moving = transfers_of(client, pool())
        moving.store(TierJob(1, (run(range(3), range(3)),)))
        done = moving.store(TierJob(2, (run(range(6), range(6)),)))
        assert (done.is_complete, done.num_bytes) == (True, 3 * ROW_BYTES)
        num_calls = len(appliance.calls)
        done = moving.store(TierJob(3, (run(range(6), range(6)),)))
        assert (done.is_complete, done.num_bytes) == (True, 0)
        assert "Commit" not in appliance.calls[num_calls:]


def test_a_chunk_whose_parent_only_the_engine_has_begins_a_chain(appliance: FakeAppliance) -> None:
    with appliance.client() as client:
        moving = transfers_of(client, pool())
        assert moving.store(TierJob(1, (run((5, 6), (0, 1), parent=4),))).is_complete
        assert moving.probe([key(5), key(6)], is_ascending) == {key(5), key(6)}
        assert moving.store(TierJob(2, (run((4,), (2,), parent=3),))).is_complete
        assert moving.probe([key(n) for n in (4, 5, 6)], is_ascending) == {key(4), key(5), key(6)}
    assert appliance.num_blocks == 3
    assert appliance.check_integrity() == []


def test_a_known_parent_is_used(appliance: FakeAppliance) -> None:
    """Leaf first: what a chain continues is never evicted before it."""
    with appliance.client() as client:
        moving = transfers_of(client, pool())
        moving.store(TierJob(1, (run((0, 1), (0, 1)),)))
        moving.store(TierJob(2, (run((2, 3), (2, 3), parent=1),)))
        moving.store(TierJob(3, (run((3, 4, 5), (3, 4, 5), parent=2),)))  # 3 is there already
    blocks = appliance.server.state.store.blocks
    links = {name: block.parent for (_, name), block in blocks.items()}
    names = [n.to_bytes(32, "big") for n in range(6)]
    parents = [links[name] for name in names]
    assert [parent and parent[1] for parent in parents] == [None, *names[:-1]]


def test_a_load_stops_where_something_is_gone(appliance: FakeAppliance) -> None:
    rows, into = pool(), np.zeros((NUM_ROWS, ROW_BYTES), np.uint8)
    with appliance.client() as client:
        transfers_of(client, rows).store(TierJob(1, (run((0, 1), (0, 1)), run((3,), (3,)))))
        back = transfers_of(client, into)
        done = back.load(TierJob(2, (run((0, 1, 2, 3), (0, 1, 2, 3)),)))
        assert done.keys == (key(0), key(1))
        assert not done.is_complete
        assert np.array_equal(into[:2], rows[:2])
        assert back._store.guard.causes == {"GONE_BEFORE_LOAD": 2}


def test_large_loads_and_long_chains_go_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain_store, "MAX_LOAD_BYTES", 15 * ROW_BYTES)  # pieces of 8: a bundle of a source
    appliance = FakeAppliance(64 * ROW_BYTES, max_blocks_per_request=20)
    rows, into = pool(), np.zeros((NUM_ROWS, ROW_BYTES), np.uint8)
    job = TierJob(1, (run(range(NUM_ROWS), range(NUM_ROWS)),))
    with appliance.client() as client:
        assert transfers_of(client, rows).store(job).is_complete
        num_calls = len(appliance.calls)
        assert transfers_of(client, into).load(job).is_complete
        assert appliance.calls[num_calls:].count("Acquire") == NUM_ROWS // 8
        assert np.array_equal(into, rows)
        keys = [key(n) for n in range(NUM_ROWS)]
        assert transfers_of(client, into).probe(keys, is_ascending) == set(keys)


def test_a_gap_ends_a_load_that_goes_in_pieces(
    monkeypatch: pytest.MonkeyPatch, appliance: FakeAppliance
) -> None:
    monkeypatch.setattr(chain_store, "MAX_LOAD_BYTES", 8 * ROW_BYTES)
    into = np.zeros((NUM_ROWS, ROW_BYTES), np.uint8)
    with appliance.client() as client:
        stored = run(range(11), range(11)), run(range(12, 24), range(12, 24))
        transfers_of(client, pool()).store(TierJob(1, stored))
        done = transfers_of(client, into).load(TierJob(2, (run(range(24), range(24)),)))
        assert done.keys == tuple(key(n) for n in range(11))
        assert not into[11:].any()


def test_probing_goes_behind_gaps_only_for_windows(appliance: FakeAppliance) -> None:
    with appliance.client() as client:
        moving = transfers_of(client, pool())
        moving.store(TierJob(1, (run((0, 1), (0, 1)), run((4, 5), (4, 5)), run((9,), (9,)))))
        ascending = [key(n) for n in range(10)]
        assert moving.probe(ascending, is_ascending) == {key(0), key(1)}
        found = moving.probe(ascending[::-1], is_descending)
        assert found == {key(n) for n in (0, 1, 4, 5, 9)}
        num_calls = len(appliance.calls)
        gaps = [key(n) for n in range(100, 100 + 3 * chain_store.MAX_GAPS)]
        assert moving.probe(gaps, is_descending) == set()
        assert appliance.calls[num_calls:].count("Lookup") == chain_store.MAX_GAPS


def test_no_answer_is_not_taken_for_a_gap(appliance: FakeAppliance) -> None:
    with appliance.client() as client:
        moving = transfers_of(client, pool())
        assert moving.probe([key(0)], is_descending) == set()
        appliance.unavailable = True
        assert moving.probe([key(n) for n in range(chain_store.MAX_GAPS)], is_descending) == set()
        assert sum(moving._store.guard.causes.values()) == 1


def test_a_full_appliance_refuses_and_nothing_is_lost_of_the_rest() -> None:
    appliance = FakeAppliance(4 * ROW_BYTES)
    with appliance.client() as client:
        moving = transfers_of(client, pool())
        done = moving.store(TierJob(1, (run(range(10), range(10)),)))
        assert done.keys == tuple(key(n) for n in range(4))  # each protects the one before
        assert moving._store.guard.causes["PUT_NO_ROOM"] >= 1
        assert sum(moving._store.guard.causes.values()) == 6
        found = moving.probe([key(n) for n in range(10)], is_ascending)
        assert found.issuperset(done.keys)
    assert appliance.check_integrity() == []


def test_a_dead_appliance_costs_one_call_and_then_none(appliance: FakeAppliance) -> None:
    now_s = 0.0
    rows = pool()
    with appliance.client() as client:
        moving = transfers_of(client, rows, breaker=Breaker(pause_s=1.0, clock=lambda: now_s))
        job = TierJob(1, (run(range(3), range(3)),))
        moving.store(job)
        appliance.unavailable = True
        assert moving.load(job).keys == ()
        for _ in range(10):
            assert moving.probe([key(0)], is_ascending) == set()
            assert moving.store(job).keys == ()
        causes = moving._store.guard.causes
        assert set(causes) <= {"NOT_RUNNING", "CONNECTION_LOST", BREAKER_OPEN}
        assert causes[BREAKER_OPEN] >= 20
        appliance.unavailable = False
        appliance.restart()  # and forgot everything: namespaces are registered anew without a word
        now_s = 2.0
        assert moving.probe([key(0)], is_ascending) == set()
        assert moving.store(job).is_complete
        assert moving.load(job).is_complete


def test_an_error_in_the_middle_leaves_what_was_moved(appliance: FakeAppliance) -> None:
    with appliance.client() as client:
        moving = transfers_of(client, pool())
        job = TierJob(1, (run((0, 1), (0, 1)), run((3, 4), (3, 4))))
        moving.store(TierJob(0, (run((0,), (0,)),)))
        appliance.fail_next(Overloaded("busy", reason="QUEUE_FULL"))
        done = moving.store(job)
        assert done.keys == (key(3), key(4))  # the first run lost its lookup, the second one went
        assert moving._store.guard.causes == {"QUEUE_FULL": 1}


def test_a_reset_tier_finds_nothing_from_before(appliance: FakeAppliance) -> None:
    epochs = [""]
    rows = pool()
    with appliance.client() as client:
        moving = TierTransfers(
            ChainStore(client, Guard("test"), 60.0), lambda group: identity(group, epochs[-1]), pool_of(rows)
        )
        job = TierJob(1, (run((0, 1), (0, 1)),))
        moving.store(job)
        assert moving.probe([key(0)], is_ascending) == {key(0)}
        epochs.append(",reset")
        assert moving.probe([key(0)], is_ascending) == set()
        assert moving.store(job).num_bytes == 2 * ROW_BYTES
        assert moving.probe([key(0), key(1)], is_ascending) == {key(0), key(1)}


def test_vllm_can_unmap_the_pool_whatever_happened_before(appliance: FakeAppliance) -> None:
    memory = mmap.mmap(-1, NUM_ROWS * ROW_BYTES)
    address = address_of(np.frombuffer(memory, np.uint8))
    store = ChainStore(appliance.client(), Guard("test"), 60.0)
    moving = TierTransfers(store, identity, PrimaryPool(address, NUM_ROWS, ROW_BYTES))
    moving.store(TierJob(1, (run((0, 1), (0, 1)),)))
    moving.load(TierJob(1, (run((0, 1), (2, 3)),)))
    appliance.unavailable = True
    moving.load(TierJob(1, (run((0, 1), (2, 3)),)))
    memory.close()  # raises BufferError while somebody has a view of it, be it in a forgotten exception


def test_rows_outside_the_pool_are_refused(appliance: FakeAppliance) -> None:
    moving = transfers_of(appliance.client(), pool())
    for row in (-1, NUM_ROWS):
        with pytest.raises(IndexError, match="of a pool of 40"):
            moving.load(TierJob(1, (run((0, 1), (0, row)),)))


def test_the_real_daemon_does_it_too(shared_daemon: Daemon) -> None:
    rows, into = pool(5), np.zeros((NUM_ROWS, ROW_BYTES), np.uint8)
    job = TierJob(1, (run(range(100, 130), range(30)), run((7,), (35,), group=2)))
    with Client(shared_daemon.target) as client:
        moving = transfers_of(client, rows)
        assert moving.store(job).is_complete
        assert transfers_of(client, into).load(job).is_complete
        assert np.array_equal(into[:30], rows[:30])
        assert np.array_equal(into[35], rows[35])
        assert moving.store(TierJob(2, (run((501, 502), (0, 1), parent=500),))).is_complete  # no such parent
        assert moving.probe([key(501), key(502)], is_ascending) == {key(501), key(502)}
        assert moving._store.guard.causes == {}
