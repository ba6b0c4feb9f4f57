"""SourceSpeed: what it learns of fetches that arrived, were late or failed."""

import pytest

from kvtier.appliance.core.copying.source_speed import (
    DEFAULT_BYTES_PER_S,
    LEAST_BYTES_PER_S,
    MARGIN,
    STORE_LATENCY_S,
    TRUST_S,
    WEIGHT,
    SourceSpeed,
)

MB = 10**6


def fetch(
    speed: SourceSpeed, landed_bytes: int, seconds: float, *, at: float = 0.0, late: bool = False
) -> None:
    """Fetch 100 MB, of which so many land, in so many seconds beyond the latency."""
    begun = speed.began(100 * MB, at)
    speed.ended(begun, 100 * MB, landed_bytes, late, at + STORE_LATENCY_S + seconds)


def test_what_arrived_moves_it_by_its_weight() -> None:
    speed = SourceSpeed(STORE_LATENCY_S)
    fetch(speed, 100 * MB, 0.1)
    assert speed.bytes_per_s(1.0) == pytest.approx((1 - WEIGHT) * DEFAULT_BYTES_PER_S + WEIGHT * 1e9)


def test_what_was_ahead_of_a_fetch_counts_for_its_time() -> None:
    speed = SourceSpeed(STORE_LATENCY_S)
    first, second = speed.began(100 * MB, 0.0), speed.began(100 * MB, 0.0)
    assert speed.fetch_s(0, 0.0) == pytest.approx(STORE_LATENCY_S + 1.0)
    assert speed.alone_s(0, 0.0) == STORE_LATENCY_S
    speed.ended(first, 100 * MB, 100 * MB, False, STORE_LATENCY_S + 0.5)
    speed.ended(second, 100 * MB, 100 * MB, False, STORE_LATENCY_S + 1.0)
    assert speed.bytes_per_s(1.0) == pytest.approx(DEFAULT_BYTES_PER_S)


@pytest.mark.parametrize(
    ("landed_bytes", "bytes_per_s"),
    [
        (0, DEFAULT_BYTES_PER_S / 2),
        (20 * MB, DEFAULT_BYTES_PER_S / 2),
        (75 * MB, 150 * MB),
        (99 * MB, 198 * MB),
    ],
)
def test_one_that_was_late_says_how_slow_it_is_by_what_landed(landed_bytes: int, bytes_per_s: float) -> None:
    speed = SourceSpeed(STORE_LATENCY_S)
    fetch(speed, landed_bytes, 0.5, late=True)
    assert speed.bytes_per_s(1.0) == pytest.approx(bytes_per_s)


def test_what_landed_sooner_than_expected_and_was_late_makes_it_no_faster() -> None:
    speed = SourceSpeed(STORE_LATENCY_S)
    fetch(speed, 90 * MB, 0.01, late=True)
    assert speed.bytes_per_s(1.0) == DEFAULT_BYTES_PER_S


@pytest.mark.parametrize("num_late", [1, 40])
def test_those_that_are_late_together_halve_it_once(num_late: int) -> None:
    speed = SourceSpeed(STORE_LATENCY_S)
    begun = [speed.began(MB, number / 100) for number in range(num_late)]
    for number, one in enumerate(begun):
        speed.ended(one, MB, 0, True, 10.0 + number / 100)
    assert speed.bytes_per_s(11.0) == DEFAULT_BYTES_PER_S / 2
    fetch(speed, 0, 10.0, at=12.0, late=True)
    assert speed.bytes_per_s(23.0) == DEFAULT_BYTES_PER_S / 4, "the next one is another lesson"


def test_nothing_is_learnt_of_one_that_failed() -> None:
    speed = SourceSpeed(STORE_LATENCY_S)
    fetch(speed, 10 * MB, 60.0)
    assert not speed.is_known(61.0)
    assert speed.bytes_per_s(61.0) == DEFAULT_BYTES_PER_S


def test_what_was_slow_is_tried_again_and_what_was_fast_is_not_forgotten() -> None:
    slow, fast = SourceSpeed(STORE_LATENCY_S), SourceSpeed(STORE_LATENCY_S)
    for number in range(20):
        fetch(slow, 0, 1.0, at=2.0 * number, late=True)
    assert slow.bytes_per_s(40.0) == LEAST_BYTES_PER_S
    fetch(fast, 100 * MB, 0.01)
    remembered = fast.bytes_per_s(1.0)
    assert remembered > DEFAULT_BYTES_PER_S
    assert slow.bytes_per_s(42.0 + TRUST_S) == DEFAULT_BYTES_PER_S
    assert fast.bytes_per_s(42.0 + TRUST_S) == remembered


def test_callers_with_little_time_do_not_make_it_slow() -> None:
    """Before: twelve fetches with 2 ms made 1,828 MB/s 1, for all tenants and a minute."""
    speed = SourceSpeed(STORE_LATENCY_S)
    fetch(speed, 100 * MB, 0.1)
    before = speed.bytes_per_s(1.0)
    for number in range(10):
        begun = speed.began(32 * MB, 1.0 + number, until=1.002 + number)
        speed.ended(begun, 32 * MB, 0, True, 1.5 + number)  # a request of the store lasts longer
    assert speed.bytes_per_s(12.0) == before
    late_s = STORE_LATENCY_S + MARGIN * 32 * MB / before
    begun = speed.began(32 * MB, 12.0, until=12.001 + late_s)
    speed.ended(begun, 32 * MB, 0, True, 12.001 + late_s)
    assert speed.bytes_per_s(13.0) == before / 2


def test_one_that_is_late_counts_where_nothing_is_known() -> None:
    speed = SourceSpeed(STORE_LATENCY_S)
    for number in range(3):
        begun = speed.began(100 * MB, float(number), until=number + 0.1)
        speed.ended(begun, 100 * MB, 0, True, number + 0.1)
    assert speed.is_known(3.0)
    assert speed.bytes_per_s(3.0) == DEFAULT_BYTES_PER_S / 2


def test_what_others_have_on_their_way_counts_as_far_as_it_goes_before_a_fetch() -> None:
    """Tenants take turns. Before: a fetch was behind all bytes of another tenant."""
    speed = SourceSpeed(STORE_LATENCY_S)
    for _ in range(80):
        speed.began(100 * MB, 0.0, tenant="acme")
    assert speed.fetch_s(100 * MB, 0.0, "acme") == pytest.approx(
        STORE_LATENCY_S + 8.1e9 / DEFAULT_BYTES_PER_S
    )
    assert speed.fetch_s(100 * MB, 0.0, "bolt") == pytest.approx(
        STORE_LATENCY_S + 0.2e9 / DEFAULT_BYTES_PER_S
    )
    begun = speed.began(100 * MB, 0.0, tenant="bolt")
    speed.ended(begun, 100 * MB, 100 * MB, False, STORE_LATENCY_S + 1.0)
    assert speed.bytes_per_s(2.0) == pytest.approx(DEFAULT_BYTES_PER_S), "the other's half of its time counts"
