"""rank_fleet: the host with the earliest first token comes first, by what is known of each."""

import math
from typing import Any

import pytest

from kvtier.appliance.core.fleet.fleet_rank import KnownHost, disk_load_s, is_full, rank_fleet

NAMES = [bytes([number]) * 32 for number in range(10)]
FETCH_S = 0.1  # of a block
COMPUTE_S = 1.0


def ranked(*hosts: KnownHost, num_fetchable: int = 0, fetch_s: float = FETCH_S) -> list[tuple[str, Any]]:
    """Return hosts and expected first tokens, in order."""
    found = rank_fleet(
        hosts, NAMES, num_fetchable, lambda count: fetch_s * count, lambda _, count: COMPUTE_S * count
    )
    for one in found:
        assert one.num_fetched + one.num_computed <= len(NAMES)
        assert one.compute_s == COMPUTE_S * one.num_computed
    return [(one.known.host, pytest.approx(one.first_token_s)) for one in found]


def test_the_holder_comes_first_and_others_fetch() -> None:
    held = KnownHost("a", num_held=8, num_worth_loading=8)
    assert ranked(KnownHost("b"), held, num_fetchable=8) == [("a", 2.0), ("b", 2.8)]
    assert ranked(KnownHost("b"), held) == [("a", 2.0), ("b", 10.0)]
    assert ranked(KnownHost("b"), held, num_fetchable=8, fetch_s=5.0)[1] == ("b", 10.0), "computing is sooner"


def test_a_long_queue_costs_the_holder_its_place() -> None:
    held = KnownHost("a", num_held=8, num_worth_loading=8, queue_s=7.0)
    assert ranked(held, KnownHost("b"), num_fetchable=8) == [("b", 2.8), ("a", 9.0)]


def test_a_full_host_keeps_its_prompts_though_another_would_answer_sooner() -> None:
    held = KnownHost("a", num_held=8, num_worth_loading=8, queue_s=7.0, is_full=True)
    assert ranked(held, KnownHost("b", is_full=True), num_fetchable=8) == [("a", 9.0), ("b", 2.8)]
    assert [is_full(share) for share in (0.0, 0.04, 0.05, 1.0, math.nan)] == [True, True, False, False, False]


def test_what_is_not_worth_loading_is_computed_and_nothing_fetched_behind_it() -> None:
    slow = KnownHost("a", num_held=8, num_worth_loading=2, load_s=0.5)
    assert ranked(slow, num_fetchable=10) == [("a", 8.5)]


def test_hosts_that_drain_come_last() -> None:
    leaving = KnownHost("a", num_held=10, num_worth_loading=10, is_draining=True)
    assert [host for host, _ in ranked(leaving, KnownHost("b"))] == ["b", "a"]


def test_of_equals_the_less_busy_one_comes_first() -> None:
    busy, idle = KnownHost("a", busy=(3, 0)), KnownHost("b", busy=(1, 9))
    assert [host for host, _ in ranked(busy, idle)] == ["b", "a"]


def test_prompts_that_no_host_has_are_spread() -> None:
    hosts = [KnownHost(name) for name in "abcd"]
    first = [
        rank_fleet(hosts, [bytes([number]) * 32], 0, lambda _: 0.0, lambda _, count: 1.0 * count)[0]
        for number in range(64)
    ]
    assert all(sum(one.known.host == name for one in first) >= 6 for name in "abcd")


@pytest.mark.parametrize(
    ("wait_s", "bytes_per_s", "seconds"),
    [
        (0.0, 0.0, 4.0),  # it did not say
        (3.0, 200.0, 5.0),
        (math.nan, math.nan, 4.0),
        (math.inf, -1.0, 4.0),
        (-5.0, math.inf, 0.0),
    ],
)
def test_what_a_host_says_of_its_disk(wait_s: float, bytes_per_s: float, seconds: float) -> None:
    assert disk_load_s(4, 100, wait_s, bytes_per_s, 100.0) == seconds
    assert disk_load_s(0, 100, wait_s, bytes_per_s, 100.0) == 0.0
