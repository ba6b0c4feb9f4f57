"""The worker with its pages on a device: a real daemon with a fake GPU fills and reads them itself."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvtier.clients import Client
from kvtier.clients.errors import InvalidRequest
from kvtier.clients.options import Timeout
from kvtier.clients.sync import Pages
from kvtier.clients.vllm.counters import Counters
from kvtier.clients.vllm.options import Options
from kvtier.clients.vllm.plan import Ack, Load, Part, Save, StepPlan
from kvtier.clients.vllm.worker.pages import LayerView, PagedGroup
from kvtier.clients.vllm.worker.side import WorkerSide
from kvtier.clients.vllm.worker.transfers import DevicePages, transfers_of
from tests.fakes.gpu.device import FakeDevice

from ...e2e.direct_scene import (
    IDENTITY,
    NUM_PAGES,
    WAIT_S,
    Runtime,
    Served,
    names,
    runtime_at,
)
from ...waiting import until

CHAIN = names("chain", 6)
PACKED = b"".join(CHAIN)
NUM_STREAMS = 64  # as many as a real device gives: a worker registers once per thread, for two streams each
FROM, INTO = [5, 2, 30, 11, 7, 19], [1, 4, 6, 8, 9, 10]


class Rank:
    """A worker whose paged cache lies on a fake GPU. Its steps compute nothing, or fill all pages with what
    `kernel` seeds when the device goes on."""

    def __init__(self, served: Served, kernel: int = 0, call_s: float = WAIT_S) -> None:
        self.runtime = Runtime(served.target, is_live=not kernel)  # its tensors are the cache
        stream = self.runtime.device.take_stream()
        self.marked: list[Any] = []
        self.over: tuple[set[str], set[str]] = (set(), set())  # loads, and those of them that failed

        def mark(event: Any) -> None:
            self.marked.append(event)
            if kernel:
                self.runtime.kernel(kernel, event)
            else:
                stream.record(event)

        self.counters = Counters()
        options = Options(target=served.target, load_timeout_s=call_s, save_timeout_s=call_s)
        views = [LayerView(t.ctypes.data, t.shape, t.strides, t.itemsize) for t in self.runtime.tensors]
        timeout = Timeout(call_s=WAIT_S, connect_s=WAIT_S, grace_s=0.1)
        self.group = PagedGroup(views, NUM_PAGES)
        self.pages = DevicePages([self.group], self.runtime.exporter, mark)
        self.pages.check([IDENTITY])
        self.side = WorkerSide(
            options,
            [self.group],
            transfers_of(
                lambda _: Client(served.target, timeout=timeout), [IDENTITY], [self.group], self.pages
            ),
            self.counters,
        )

    def save(self, block_ids: list[int]) -> None:
        self.side.start_saves(StepPlan(saves=[Save(1, 0, "s", b"", PACKED, block_ids)]))

    def saved(self) -> Ack:
        acks: dict[int, Ack] = {}
        until(lambda: acks.update(self.side.take_acks().by_job) or acks)
        return acks[1]

    def load(self, block_ids: list[int], request: str = "r") -> None:
        part = Part(0, PACKED, 0, block_ids)
        self.side.start_loads(StepPlan(loads=[Load(request, "s", parts=[part])]))

    def loaded(self) -> tuple[set[str], set[str]]:
        until(self.has_loaded)
        return self.over

    def has_loaded(self) -> bool:
        self.over = self.side.take_loaded()
        return bool(self.over[0])

    def close(self) -> None:
        self.side.close()
        self.runtime.close()


@contextmanager
def rank_at(served: Served, **options: Any) -> Iterator[Rank]:
    rank = Rank(served, **options)
    yield rank
    rank.close()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    device = FakeDevice(is_live=True, num_streams=NUM_STREAMS, seed=1)
    with Served(tmp_path, device=device) as running:
        yield running
        running.assert_at_rest()


def test_what_one_rank_saves_another_loads(served: Served) -> None:
    with rank_at(served) as one, rank_at(served) as two:
        one.runtime.fill(1)
        before = two.runtime.whole.copy()
        one.save(FROM)
        assert one.saved() == Ack(1, 6)
        two.load(INTO)
        assert two.loaded() == ({"r"}, set())
        assert two.runtime.read(INTO) == one.runtime.read(FROM)
        others = [page for page in range(NUM_PAGES) if page not in INTO]
        assert (two.runtime.whole[:, others] == before[:, others]).all()
        assert one.counters.take()["save_blocks_stored"] == 6
        assert two.counters.take()["load_blocks"] == 6
    assert served.count("direct_put_blocks") == served.count("direct_get_blocks") == 6


def test_a_load_that_finds_too_little_has_failed(served: Served) -> None:
    with rank_at(served) as rank:
        rank.load(INTO)
        assert rank.loaded() == ({"r"}, {"r"})


def test_the_daemon_waits_for_what_the_step_computes(served: Served) -> None:
    """The mark lies behind a kernel that has not run when the step's saves are handed over."""
    with rank_at(served, kernel=7) as one, rank_at(served) as two:
        one.runtime.fill(1)
        before = one.runtime.read(FROM)
        one.save(FROM)
        served.until(lambda: served.waits_for_a_runtime)
        acks = one.side.take_acks().by_job
        assert not acks
        until(lambda: (one.runtime.device.run(), acks.update(one.side.take_acks().by_job)) and acks)
        assert acks[1] == Ack(1, 6)
        assert one.runtime.read(FROM) != before, "the kernel has not run"
        two.load(INTO)
        assert two.loaded() == ({"r"}, set())
        assert two.runtime.read(INTO) == one.runtime.read(FROM)


def test_a_save_waits_for_its_own_step_and_not_for_later_ones(served: Served) -> None:
    """An engine enqueues steps ahead: there is always one that is not done, and each hands something over."""
    with rank_at(served, kernel=7) as rank:
        device = rank.runtime.device
        for job in (1, 2, 3):
            rank.side.start_saves(
                StepPlan(saves=[Save(job, 0, "s", b"", PACKED[: 32 * job], FROM[:job])]), 0.0
            )
        first = rank.marked[0]
        until(lambda: first.is_done() or not device.step())
        assert [event.is_done() for event in rank.marked] == [True, False, False]
        acks: dict[int, Ack] = {}
        until(lambda: acks.update(rank.side.take_acks().by_job) or acks)
        assert acks == {1: Ack(1, 1)}
        device.run()
        until(lambda: acks.update(rank.side.take_acks().by_job) or len(acks) == 3)


@pytest.fixture
def doubted(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set once a call without an answer is asked about."""
    begun, settle = threading.Event(), Pages.settle

    def noted(pages: Pages) -> None:
        begun.set()
        settle(pages)

    monkeypatch.setattr(Pages, "settle", noted)
    return begun


def test_a_load_without_an_answer_is_over_when_the_daemon_has_let_go(
    tmp_path: Path, doubted: threading.Event
) -> None:
    """Until then the engine must not use the blocks again."""
    with Served(tmp_path, device=FakeDevice(num_streams=NUM_STREAMS, seed=3)) as stalled:
        with rank_at(stalled, call_s=3.0) as rank:
            with runtime_at(stalled.target) as other:
                stalled.let_finish(other.start(other.pages.put, other.namespace, CHAIN, FROM))
            rank.load(INTO)
            until(stalled.device.step)  # sees that the step before the load is over, and copies nothing
            stalled.until(doubted.is_set)
            assert stalled.thread.call(lambda: stalled.has_copies)
            assert rank.side.take_loaded() == (set(), set())
            rank.load([20, 21, 22, 23, 24, 25], "behind it")
            assert rank.side.take_loaded() == ({"behind it"}, {"behind it"}), "there may never be an answer"
            stalled.pump(rank.has_loaded)
            assert rank.over == ({"r"}, {"r"})
            assert not stalled.has_copies
            closing = rank.runtime.start(rank.side.close)
            stalled.let_finish(closing)
        stalled.assert_at_rest()


def test_saves_behind_one_without_an_answer_give_their_blocks_back(
    tmp_path: Path, doubted: threading.Event
) -> None:
    with Served(tmp_path, device=FakeDevice(num_streams=NUM_STREAMS, seed=3)) as stalled:
        with rank_at(stalled, call_s=3.0) as rank:
            rank.save(FROM)
            stalled.until(doubted.is_set)
            assert rank.side.take_acks().by_job == {}
            rank.side.start_saves(StepPlan(saves=[Save(2, 0, "s", b"", PACKED, INTO)]))
            assert rank.side.take_acks().by_job == {2: Ack(1, 0)}
            acks: dict[int, Ack] = {}
            stalled.pump(lambda: acks.update(rank.side.take_acks().by_job) or 1 in acks)
            closing = rank.runtime.start(rank.side.close)
            stalled.let_finish(closing)
        stalled.assert_at_rest()


def test_only_what_is_handed_over_is_marked(served: Served) -> None:
    with rank_at(served) as rank:
        rank.side.start_loads(StepPlan())
        rank.side.start_saves(StepPlan())
        assert rank.marked == []


def test_a_layout_that_cannot_be_given_away_is_refused(served: Served) -> None:
    with rank_at(served) as rank:
        halves = [
            view._replace(shape=(*view.shape[:3], view.shape[3] // 2)) for view in rank.group.layers
        ]  # of each head's content: runs that are neither one nor the heads'
        wrong = DevicePages([PagedGroup(halves, NUM_PAGES)], rank.runtime.exporter, print)
        with pytest.raises(InvalidRequest, match="VLLM_KV_CACHE_LAYOUT"):
            wrong.check([IDENTITY])
