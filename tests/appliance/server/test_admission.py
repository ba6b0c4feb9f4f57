"""Admission under overload, on a clock of its own: probes say how long calls wait."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.appliance.errors import BusyError
from kvtier.appliance.server import admission
from kvtier.appliance.server.admission import Admission

MS = 1_000_000
FOREVER = float("inf")
LATE_NS = 3 * max(admission.MAX_DELAYS_NS.values())
FEW_CALLS, MANY_CALLS = sorted(admission.MAX_DELAYS_NS)


class Queue:
    """An admission, its clock, and what became of the calls."""

    def __init__(self) -> None:
        self.admission = Admission()
        self.now_ns = 10**12

    def call(self, lane: str, deadline_ns: float = FOREVER) -> BusyError | None:
        """Make a call; return its refusal."""
        try:
            self.admission.admit(lane, deadline_ns, self.now_ns)
        except BusyError as refusal:
            return refusal
        return None

    def probe(self, delay_ns: int, num_calls: int = 2 * FEW_CALLS, lane: str = "crowd") -> None:
        """Have a probe take `delay_ns`, during which calls come."""
        if not self.admission.begin_probe(self.now_ns):
            for _ in range(admission.NUM_CALLS_PER_PROBE):
                self.call(lane)
            assert self.admission.begin_probe(self.now_ns)
        for _ in range(num_calls):
            self.now_ns += delay_ns // num_calls
            self.call(lane)
        self.admission.end_probe(self.now_ns)

    def overload(self) -> None:
        """Have probes be late for longer than a burst."""
        for _ in range(admission.BURST_NS // LATE_NS + 2):
            self.probe(LATE_NS)
        assert self.admission.delay_ns(self.now_ns) > max(admission.MAX_DELAYS_NS.values())


@pytest.fixture
def queue() -> Queue:
    return Queue()


def test_while_probes_are_quick_every_call_is_admitted(queue: Queue) -> None:
    for _ in range(50):
        queue.probe(admission.MAX_DELAYS_NS[FEW_CALLS])
        assert [queue.call("a") for _ in range(100)] == [None] * 100


def test_a_burst_is_admitted(queue: Queue) -> None:
    queue.probe(LATE_NS)
    assert [queue.call("a") for _ in range(500)] == [None] * 500


def test_under_overload_a_refusal_says_when_to_come_back(queue: Queue) -> None:
    queue.overload()
    refusals = [found for _ in range(40) if (found := queue.call("a")) is not None]
    assert len(refusals) == 40 - 40 // admission.NUM_CALLS_PER_TURN, "the lane has its turns"
    assert {refusal.reason for refusal in refusals} == {"TOO_MANY_IN_FLIGHT"}
    hints_s = [refusal.retry_after_s for refusal in refusals]
    assert hints_s == sorted(hints_s)
    assert hints_s[0] > 0
    assert len(set(hints_s)) == len(hints_s), "not all at the same time"


def test_no_hint_is_later_than_the_limit(queue: Queue) -> None:
    queue.overload()
    hints_s = [found.retry_after_s for _ in range(10_000) if (found := queue.call("a")) is not None]
    assert max(hints_s) == admission.MAX_RETRY_NS / 1e9


def test_refused_callers_come_again_no_faster_than_they_are_served(queue: Queue) -> None:
    """3,000 callers, told to come again within a second, were more than could be refused."""
    queue.overload()
    in_2_s = int(1e9 / queue.admission.service_ns)  # two calls for each that was refused
    hints_s = [found.retry_after_s for _ in range(in_2_s) if (found := queue.call("a")) is not None]
    assert len(set(hints_s)) == len(hints_s) > in_2_s // 2


def test_a_flood_refuses_no_call_of_a_quiet_caller(queue: Queue) -> None:
    queue.overload()
    for _ in range(20):
        flood = [queue.call("flood") for _ in range(20)]
        assert sum(refusal is not None for refusal in flood) >= 15
        assert queue.call("quiet") is None


def test_hints_of_one_caller_do_not_grow_by_the_refusals_of_another(queue: Queue) -> None:
    queue.overload()
    for _ in range(1000):
        queue.call("flood")
    queue.call("quiet")
    refusal = queue.call("quiet")
    assert refusal is not None
    assert refusal.retry_after_s < 0.2 * admission.MAX_RETRY_NS / 1e9


def test_a_call_that_cannot_meet_its_deadline_is_refused_though_it_has_its_turn(queue: Queue) -> None:
    queue.overload()
    refusal = queue.call("hurried", queue.now_ns + queue.admission.service_ns / 2)
    assert refusal is not None
    assert "deadline" in refusal.message
    assert queue.call("patient", queue.now_ns + 2 * queue.admission.service_ns) is None


def test_a_quick_probe_ends_it_and_a_late_one_soon_after_begins_it_again(queue: Queue) -> None:
    queue.overload()
    queue.probe(MS)
    assert [queue.call("a") for _ in range(100)] == [None] * 100
    queue.probe(LATE_NS)
    assert any(queue.call("a") for _ in range(10)), "no burst is tolerated again"


def test_after_a_calm_time_a_burst_is_tolerated_again(queue: Queue) -> None:
    queue.overload()
    queue.probe(MS)
    queue.now_ns += 2 * admission.CALM_NS
    queue.probe(MS)
    queue.probe(LATE_NS)
    assert [queue.call("a") for _ in range(100)] == [None] * 100


def test_a_machine_that_stops_is_no_overload(queue: Queue) -> None:
    """A late probe with few calls beside it: to refuse them would not help."""
    for _ in range(50):
        queue.probe(LATE_NS, num_calls=1)
        assert queue.call("crowd") is None


@pytest.mark.parametrize(("num_calls", "is_refused"), [(MANY_CALLS, True), (MANY_CALLS - 1, False)])
def test_the_more_calls_are_beside_a_probe_the_earlier_it_is_late(
    queue: Queue, num_calls: int, is_refused: bool
) -> None:
    """With 25 ms for any number of them, a refusal itself waited for 25 ms and more."""
    delay_ns = (admission.MAX_DELAYS_NS[MANY_CALLS] + admission.MAX_DELAYS_NS[FEW_CALLS]) // 2
    for _ in range(admission.BURST_NS // delay_ns + 2):
        queue.probe(delay_ns, num_calls)
    assert any(queue.call("a") for _ in range(10)) is is_refused


@pytest.mark.parametrize(("is_over", "is_refused"), [(False, True), (True, False)])
def test_callers_that_were_told_to_come_later_count_as_waiting(
    queue: Queue, is_over: bool, is_refused: bool
) -> None:
    """Without them the queue of 200 callers settled at 33 calls, which take 10 ms. When they are gone, a few
    callers are not refused for their own queue."""
    queue.overload()
    assert any(queue.call("a") for _ in range(10 * MANY_CALLS))
    queue.probe(MS)
    queue.now_ns += is_over * admission.MAX_RETRY_NS
    delay_ns = (admission.MAX_DELAYS_NS[MANY_CALLS] + admission.MAX_DELAYS_NS[FEW_CALLS]) // 2
    for _ in range(admission.BURST_NS // delay_ns + 2):
        queue.probe(delay_ns, FEW_CALLS)
    assert any(queue.call("a") for _ in range(10)) is is_refused


def test_a_probe_that_got_lost_says_nothing(queue: Queue) -> None:
    queue.overload()
    assert queue.admission.begin_probe(queue.now_ns)
    queue.now_ns += 10 * LATE_NS
    queue.admission.end_probe(queue.now_ns, has_arrived=False)
    assert queue.admission.delay_ns(queue.now_ns) == 0


def test_a_probe_under_way_counts_before_it_is_back(queue: Queue) -> None:
    queue.overload()
    queue.probe(MS)
    for _ in range(admission.NUM_CALLS_PER_PROBE):
        queue.call("a")
    assert queue.admission.begin_probe(queue.now_ns)
    assert not queue.admission.begin_probe(queue.now_ns), "one at a time"
    queue.now_ns += LATE_NS
    assert any(queue.call("a") for _ in range(2 * FEW_CALLS))


def test_the_service_time_is_learnt_from_probes(queue: Queue) -> None:
    for _ in range(100):
        queue.probe(8 * MS, num_calls=16)
    assert queue.admission.service_ns == pytest.approx(0.5 * MS, rel=0.05)


@given(st.lists(st.sampled_from("abcd"), min_size=200, max_size=400))
def test_lanes_that_call_get_as_many_turns_as_each_other(calls: list[str]) -> None:
    queue = Queue()
    queue.overload()
    num_admitted = dict.fromkeys("abcd", 0)
    for lane in calls:
        num_admitted[lane] += queue.call(lane) is None
    num_calls = {lane: calls.count(lane) for lane in "abcd"}
    assert sum(num_admitted.values()) <= len(calls) / admission.NUM_CALLS_PER_TURN + 2 * len(num_admitted)
    for lane, number in num_admitted.items():
        assert number > 0 or not num_calls[lane], f"{lane} never had its turn"
