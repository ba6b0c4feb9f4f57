"""Remembered: whose values are forgotten when there are too many."""

from kvtier.appliance.core.remembered import MAX_TENANTS, Remembered


def known(values: Remembered[int, str], tenant: str) -> list[int]:
    """Return the keys below 100 that are remembered of a tenant."""
    return [key for key in range(100) if values.get(tenant, key) is not None]


def test_of_one_tenant_the_oldest_is_forgotten() -> None:
    values = Remembered[int, str](3)
    for key in (1, 2, 3, 1, 4):
        values.put("", key, "x")
    assert known(values, "") == [1, 3, 4]
    assert len(values) == 3


def test_the_tenant_that_has_the_most_forgets_its_oldest() -> None:
    values = Remembered[int, str](8)
    for key in range(20):
        values.put("acme", key, "x")
    assert known(values, "acme") == list(range(12, 20)), "what others do not use is lent"
    for key in range(20):
        values.put("bolt", key, "x")
    assert known(values, "acme") == [16, 17, 18, 19], "but for an equal part"
    assert known(values, "bolt") == [16, 17, 18, 19]
    values.put("cord", 1, "x")
    for key in range(20, 90):
        values.put("acme", key, "x")
    assert known(values, "cord") == [1], "nothing of one that has less is forgotten"
    assert len(known(values, "bolt")) >= 3
    assert len(values) == 8


def test_many_small_tenants_do_not_keep_one_from_what_the_largest_has() -> None:
    """Before: beyond an equal part a tenant forgot its own, whatever the largest had."""
    values = Remembered[int, str](1000)
    for key in range(1000):
        values.put("acme", key, "x")
    for number in range(20):
        values.put(f"small {number}", number, "x")
    for key in range(100):
        values.put("bolt", key, "x")
    assert len(known(values, "bolt")) == 100
    assert all(values.get(f"small {number}", number) for number in range(20))


def test_tenants_that_are_gone_do_not_take_the_places_of_others() -> None:
    values = Remembered[int, str](10_000)
    for number in range(5000):
        values.put(f"gone {number}", number, "x")
    for key in range(10_000):
        values.put("acme", key, "x")
    num_known = sum(values.get("acme", key) is not None for key in range(10_000))
    assert num_known == len(values) - (MAX_TENANTS - 1)
    assert len(values) == 10_000
