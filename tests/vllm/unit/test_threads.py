"""The worker's threads as they run in an engine, against a FakeAppliance."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from kvtier.clients import Client, ExpectedBlocks
from kvtier.clients.vllm.counters import Counters
from kvtier.clients.vllm.plan import Ack, Again, Load, Part, Save, StepPlan
from kvtier.clients.vllm.worker import side
from kvtier.clients.vllm.worker.side import WorkerSide
from kvtier.clients.vllm.worker.transfers import Fetch, transfers_of
from kvtier.testing import FakeAppliance

from ...waiting import until
from .engine import PagedCache, content
from .threads_scene import GROUPS, HASHES, OPTIONS, WAIT_S, identities


@pytest.fixture
def appliance() -> Iterator[FakeAppliance]:
    made = FakeAppliance(capacity_bytes=8 << 20)
    yield made
    assert made.check_integrity() == []


class Worker:
    """Threads over one paged cache."""

    def __init__(self, appliance: FakeAppliance) -> None:
        self.cache = PagedCache(GROUPS, 12)
        self.counters = Counters()
        self.side = WorkerSide(
            OPTIONS,
            self.cache.paged,
            transfers_of(lambda _: appliance.client(name="worker"), identities(GROUPS), self.cache.paged),
            self.counters,
            clock=lambda: 0.0,  # an open breaker stays open, however long the machine thinks
        )
        transfers = [self.side._save_transfer, *self.side._load_transfers]
        until(
            lambda: all(transfer._namespaces for transfer in transfers)
        )  # before a test switches anything off

    def load(self, *loads: Load) -> tuple[set[str], set[str]]:
        finished: set[str] = set()
        failed: set[str] = set()
        self.side.start_loads(StepPlan(loads=list(loads)))

        def all_over() -> bool:
            now = self.side.take_loaded()
            finished.update(now[0])
            failed.update(now[1])
            return len(finished) == len(loads)

        until(all_over)
        return finished, failed

    def save(self, *saves: Save) -> dict[int, Ack]:
        acks: dict[int, Ack] = {}
        self.side.start_saves(StepPlan(saves=list(saves)))

        def all_over() -> bool:
            acks.update(self.side.take_acks().by_job)
            return len(acks) == len(saves)

        until(all_over)
        return acks


@pytest.fixture
def worker(appliance: FakeAppliance) -> Iterator[Worker]:
    made = Worker(appliance)
    yield made
    made.side.close()


NAMES = GROUPS[0].chain(HASHES)


def save_of(job: int, first: int, block_ids: list[int]) -> Save:
    names = NAMES[first : first + len(block_ids)]
    return Save(job, 0, "session", NAMES[first - 1] if first else b"", b"".join(names), block_ids)


def load_of(name: str, first: int, block_ids: list[int]) -> Load:
    hashes = b"".join(NAMES[: first + len(block_ids)])
    return Load(name, "session", parts=[Part(0, hashes, first, block_ids)])


def test_saved_blocks_come_back_into_other_pages(worker: Worker) -> None:
    for block, name in zip([3, 5, 7], NAMES, strict=False):
        worker.cache.write(0, block, content(name, 0))
    assert worker.save(save_of(1, 0, [3, 5]), save_of(2, 2, [7])) == {1: Ack(1, 2), 2: Ack(1, 1)}
    assert worker.load(load_of("all", 0, [8, 9, 10]), load_of("end", 2, [11])) == ({"all", "end"}, set())
    for block, name in zip([8, 9, 10, 11], [*NAMES[:3], NAMES[2]], strict=True):
        assert worker.cache.is_right(0, block, name)
    assert worker.counters.take()["load_blocks"] == 4


def test_only_the_first_call_of_a_long_load_expects_blocks(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before: a host was told the names of the second one as if a chain began with them."""
    monkeypatch.setattr(side, "MAX_BLOCKS", 2)
    worker.save(save_of(1, 0, [3, 5, 7]))
    expected: list[ExpectedBlocks | None] = []
    for transfer in worker.side._load_transfers:

        def noting(fetch: Fetch, mark: int, get: Any = transfer.get) -> Any:
            expected.append(fetch.expected)
            return get(fetch, mark)

        monkeypatch.setattr(transfer, "get", noting)
    load = load_of("long", 0, [8, 9, 10])
    load.expected = ExpectedBlocks("", 5, 0, 0.01)
    assert worker.load(load) == ({"long"}, set())
    assert expected == [load.expected, None]


def test_a_load_whose_blocks_still_arrive_holds_up_no_other(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker.save(save_of(1, 0, [3]))
    have_arrived, load_all = threading.Event(), worker.side._load_all

    def load_when_arrived(link: Any, load: Load, salt: str, mark: int) -> bool:
        assert not load.is_arriving or have_arrived.wait(WAIT_S)
        return load_all(link, load, salt, mark)

    monkeypatch.setattr(worker.side, "_load_all", load_when_arrived)
    slow = load_of("slow", 0, [8])
    slow.is_arriving = True
    worker.side.start_loads(StepPlan(loads=[slow]))
    assert worker.load(load_of("quick", 0, [9])) == ({"quick"}, set())
    have_arrived.set()
    until(lambda: worker.side.take_loaded() == ({"slow"}, set()))


def test_a_load_of_what_is_not_there_fails(worker: Worker) -> None:
    worker.save(save_of(1, 0, [3]))
    assert worker.load(load_of("too much", 0, [8, 9])) == ({"too much"}, {"too much"})
    assert worker.load(Load("nothing", "s"), load_of("one", 0, [8])) == ({"nothing", "one"}, {"nothing"})


def test_a_load_that_breaks_off_fails(appliance: FakeAppliance, worker: Worker) -> None:
    worker.save(save_of(1, 0, [3]))
    appliance.unavailable = True
    assert worker.load(load_of("gone", 0, [8])) == ({"gone"}, {"gone"})
    bad = Load("bad", "s", parts=[Part(0, b"".join(NAMES[:1]), 0, [99])])
    assert worker.load(bad) == ({"bad"}, {"bad"})


def test_the_appliance_is_told_what_prefill_took(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[float] = []
    put = Client.put

    def note(client: Client, *arguments: Any, **named: Any) -> Any:
        told.append(named["prefill_s"])
        return put(client, *arguments, **named)

    monkeypatch.setattr(Client, "put", note)
    half, nothing = save_of(1, 0, [3, 5]), save_of(2, 2, [7])
    half.prefill_share = 0.5
    worker.side.start_saves(StepPlan(saves=[half, nothing]), step_s=3.0)
    until(lambda: len(told) == 2)
    assert told == [1.5, 0.0]


def test_orphans_and_a_gone_appliance_are_told_apart(appliance: FakeAppliance, worker: Worker) -> None:
    assert worker.save(save_of(1, 1, [4])) == {1: Ack(1, 0, Again.ALL)}
    appliance.unavailable = True
    assert worker.save(save_of(2, 0, [3]), save_of(3, 0, [3])) == {2: Ack(1, 0), 3: Ack(1, 0)}
    counted = worker.counters.take()
    assert (counted["save_failures"], counted["saves_skipped_breaker"]) == (1, 1)


def test_what_was_never_begun_is_reported_as_over(worker: Worker) -> None:
    plan = StepPlan(loads=[load_of("r", 0, [8])], saves=[save_of(1, 0, [3])])
    worker.side.fail_loads(plan)
    worker.side.drop_saves(plan)
    assert worker.side.take_loaded() == ({"r"}, {"r"})
    assert worker.side.take_acks().by_job == {1: Ack(1, 0)}
