"""The bucket of bytes that may be written a day, by itself."""

from hypothesis import given
from hypothesis import strategies as st

from kvtier.appliance.core.copying.write_budget import DAY_S, WriteBudget

DAILY = 1_000_000


def test_it_begins_full_and_fills_in_a_day() -> None:
    budget = WriteBudget(DAILY)
    assert budget.left_bytes(0.0) == DAILY
    budget.wrote(DAILY, 10.0)
    assert not budget.allows(1, 10.0)
    assert budget.left_bytes(10.0 + DAY_S / 4) == DAILY // 4
    assert budget.left_bytes(10.0 + 5 * DAY_S) == DAILY


def test_debt_is_a_day_at_most() -> None:
    budget = WriteBudget(DAILY)
    budget.wrote(100 * DAILY, 0.0)
    assert budget.is_overdrawn(0.0)
    assert budget.allowed_at(1, 0.0) - DAY_S < 1.0
    assert budget.left_bytes(1.5 * DAY_S) == DAILY // 2


def test_what_is_larger_than_a_day_never_comes() -> None:
    assert WriteBudget(DAILY).allowed_at(DAILY + 1, 0.0) == float("inf")


def test_without_a_limit_everything_is_counted_and_nothing_waits() -> None:
    budget = WriteBudget(None)
    budget.wrote(5, 0.0)
    budget.wrote(7, DAY_S / 2)
    assert budget.allows(1 << 60, DAY_S / 2)
    assert budget.left_bytes(0.0) is None
    assert budget.written(DAY_S / 2) == 12
    assert budget.written(1.25 * DAY_S) == 7


PAUSES = st.sampled_from([0.0, 1.0, 3600.0, DAY_S / 3])
SIZES = st.sampled_from([1, DAILY // 7, DAILY // 2, DAILY])


@given(st.lists(st.tuples(PAUSES, SIZES, st.booleans(), st.booleans()), max_size=30))
def test_what_waits_for_it_never_exceeds_a_day_and_a_day_a_day(
    writes: list[tuple[float, int, bool, bool]],
) -> None:
    """Over restarts, too, on clocks that begin anew."""
    budget, now, shift = WriteBudget(DAILY), 0.0, 0.0
    waited: list[tuple[float, int]] = []  # when, bytes
    for pause_s, num_bytes, can_wait, restarts in writes:
        now += pause_s
        if restarts and (state := budget.state()) is not None:
            budget, before, shift = WriteBudget(DAILY), shift, now
            budget.restore(state, state["as_of"] + before - shift)
        if not can_wait:
            budget.wrote(num_bytes, now - shift)
        elif budget.allows(num_bytes, now - shift):
            budget.wrote(num_bytes, now - shift)
            waited.append((now, num_bytes))
    for first, (began_at, _) in enumerate(waited):
        total = 0
        for at, num_bytes in waited[first:]:
            total += num_bytes
            assert total <= DAILY * (1 + (at - began_at) / DAY_S) + 1


@given(st.integers(1, 3 * DAILY), st.floats(0, 2 * DAY_S))
def test_when_it_says_so_it_allows_it(written: int, now: float) -> None:
    budget = WriteBudget(DAILY)
    budget.wrote(written, 0.0)
    at = budget.allowed_at(DAILY // 2, now)
    assert budget.allows(DAILY // 2 - 1, at)
