"""Shares of a limit: what is reserved stays free for others, the rest is used as far as it is left free."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.appliance.core.shares import Shares

TENANTS = ("acme", "bolt", "cog", "dyn")


def greed(shares: Shares, tenant: str) -> int:
    while shares.take(tenant, 1):
        pass
    return shares.held(tenant)


@pytest.mark.parametrize(
    ("num_tenants", "taken"), [(None, [48, 24, 12]), (0, [96, 0]), (2, [48, 36]), (4, [36, 24, 18, 15])]
)
def test_each_tenant_takes_its_part_and_at_most_as_much_of_the_rest_as_it_leaves_free(
    num_tenants: int | None, taken: list[int]
) -> None:
    shares = Shares(96, num_tenants)
    largest = shares.largest("acme")
    assert [greed(shares, tenant) for tenant in TENANTS[: len(taken)]] == taken
    assert largest == taken[0]


def test_the_common_tenant_of_a_daemon_without_tenants_takes_everything() -> None:
    assert greed(Shares(100), "") == 100
    assert greed(Shares(100, 2), "") < 100  # beside tenants it is one of them


@given(
    st.integers(1, 200),
    st.lists(st.tuples(st.sampled_from(TENANTS), st.integers(1, 40), st.booleans()), max_size=80),
)
def test_what_is_reserved_for_a_tenant_is_always_there(
    capacity: int, steps: list[tuple[str, int, bool]]
) -> None:
    shares, held = Shares(capacity, len(TENANTS)), Counter[str]()
    reserved = capacity // (2 * len(TENANTS))
    for tenant, number, is_given in steps:
        if is_given and held[tenant]:
            shares.give(tenant, min(number, held[tenant]))
            held[tenant] -= min(number, held[tenant])
        elif shares.take(tenant, number):
            held[tenant] += number
        assert shares.taken == sum(held.values()) <= capacity
        assert {one: shares.held(one) for one in TENANTS} == {one: held[one] for one in TENANTS}
        for one in TENANTS:
            left = reserved - held[one]
            assert left <= 0 or shares.may_take(one, left)


def test_another_capacity_keeps_what_was_taken() -> None:
    shares = Shares(100, 2)
    greed(shares, "acme")
    shares.resize(40, 2)
    assert shares.held("acme") == shares.taken == 50
    assert not shares.take("acme", 1)
    shares.give("acme", 45)
    assert shares.take("bolt", 10)
