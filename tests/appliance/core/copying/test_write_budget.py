"""The bucket of bytes that may be written a day, by itself."""

from typing import Any

import pytest
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


def test_what_failed_is_given_back() -> None:
    budget = WriteBudget(DAILY, 2)
    budget.wrote(700, 0.0)
    budget.wrote(300, 0.0, "acme")
    budget.not_written(300, 0.0, "acme")
    assert (budget.written(0.0), budget.left_bytes(0.0)) == (700, DAILY - 700)
    assert budget.allows(SHARE - 700, 0.0, "acme")


@pytest.mark.parametrize("first", [None, 10 * DAILY])
@pytest.mark.parametrize("is_restart", [True, False], ids=["restart", "reload"])
def test_another_limit_forgets_nothing(first: int | None, is_restart: bool) -> None:
    """Before: a restart under a larger limit gave what was left of the former one, one after `unlimited`
    another day's worth."""
    for limit, left in ((DAILY, -DAILY), (12 * DAILY, 3 * DAILY)):
        budget = WriteBudget(first)
        budget.wrote(9 * DAILY, 100.0)
        if is_restart:
            state = budget.state()
            assert state is not None
            budget = WriteBudget(limit)
            budget.restore(state, 100.0)
        else:
            budget.limit(limit, 100.0)
        assert budget.left_bytes(100.0) == max(0, left)
        assert budget.is_overdrawn(100.0) == (left < 0)


# --------------------------------------------------------------------------------------------- tenants

RESERVED = DAILY // 4  # of two tenants
SHARE = RESERVED + DAILY // 4  # of one alone


def test_a_tenant_writes_no_more_than_its_share_over_restarts_too() -> None:
    budget = WriteBudget(DAILY, 2)
    assert budget.allows(SHARE, 0.0, "acme")
    budget.wrote(SHARE, 0.0, "acme")
    for _ in range(2):
        assert not budget.allows(2, 0.0, "acme")
        assert budget.allows(RESERVED + DAILY // 8, 0.0, "bolt")
        state, budget = budget.state(), WriteBudget(DAILY, 2)
        assert state is not None
        budget.restore(state, 0.0)


def test_what_is_reserved_for_a_tenant_is_there_although_spills_of_others_took_all() -> None:
    budget = WriteBudget(DAILY, 2)
    for _ in range(5):
        budget.wrote(DAILY, 0.0, "acme")
    assert budget.is_overdrawn(0.0)
    assert not budget.allows(1, 0.0, "acme")
    assert budget.allows(RESERVED, 0.0, "bolt")
    budget.wrote(RESERVED, 0.0, "bolt")
    assert not budget.allows(1, 0.0, "bolt")
    assert budget.allows(RESERVED, DAY_S / 2, "bolt")  # half of what leaks is its own


def test_shares_that_are_not_used_are_lent() -> None:
    """A tenant alone writes a whole day's worth a day, as often as it may."""
    budget, now, written = WriteBudget(DAILY, 4), 0.0, 0
    while now < 10 * DAY_S:
        if budget.allows(DAILY // 100, now, "acme"):
            budget.wrote(DAILY // 100, now, "acme")
            written += DAILY // 100
        else:
            now = max(now + 1, budget.allowed_at(DAILY // 100, now, "acme"))
    assert 9.9 * DAILY < written < 10.5 * DAILY
    assert budget.allows(DAILY // 8, now, "bolt")


@given(
    st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, DAILY), st.booleans()), max_size=20),
    st.integers(1, DAILY),
)
def test_a_share_is_looked_at_a_bounded_number_of_times(
    writes: list[tuple[str, int, bool]], wanted: int
) -> None:
    """Before: one that never allows anything was looked at ten times a second for ever (seeds 11, 92)."""
    budget = WriteBudget(DAILY, 3)
    for tenant, num_bytes, is_spill in writes:
        if is_spill or budget.allows(num_bytes, 0.0, tenant):
            budget.wrote(num_bytes, 0.0, tenant)
    now, num_looks = 0.0, 0
    while not budget.allows(wanted, now, "a"):
        at = budget.allowed_at(wanted, now, "a")
        if at == float("inf"):
            assert wanted > DAILY // 6 + DAILY // 4
            return
        now, num_looks = max(at, now + 0.1), num_looks + 1
    assert num_looks < 200


@pytest.mark.parametrize("wrong", [{"bucket": {"a": -1}}, {"hours": {"0": -1}}, {"bucket": {"a": "x"}}])
def test_what_state_never_returned_is_refused(wrong: dict[str, Any]) -> None:
    budget = WriteBudget(DAILY)
    budget.wrote(1, 0.0)
    state = budget.state()
    assert state is not None
    with pytest.raises(ValueError, match=r"bucket|hours|invalid literal"):
        WriteBudget(DAILY).restore({**state, **wrong}, 0.0)
