"""Ids that a tenant is told say nothing of how many others were told theirs.

One tenant takes a few of each kind, then another one makes 1,000 requests, then the first takes a few more.
Of a counter the second few are 1,000 above the first; here nothing in them follows from how many stand
between.
"""

from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.appliance.core import events as ev
from kvtier.appliance.core.results import NamespaceResult, PinResult, ReserveResult
from kvtier.appliance.core.secret_ids import SecretIds, permuted_32
from kvtier.tiers.block import NamespaceIdentity

from ..appliance.core.requests.test_quotas import ACME, BOLT, DOMAINS, GEOMETRY, Shared, names

NUM_IDS = 64
NUM_BETWEEN = 1000


def lease(shared: Shared, tenant: int, number: int) -> int:
    lease_id = shared.acquire(tenant, 0, 1).lease_id
    shared.do(ev.ReleaseRequested(None, tenant, [lease_id]))
    return lease_id


def pin(shared: Shared, tenant: int, number: int) -> int:
    result = shared.pin(tenant, 0, 1)
    assert isinstance(result, PinResult)
    shared.do(ev.UnpinRequested(result.pin_id))
    return result.pin_id


def reservation(shared: Shared, tenant: int, number: int) -> int:
    chain = names(tenant, 1000 + number, 1)
    space = shared.namespace[tenant]
    result = shared.ask(lambda call: ev.ReserveRequested(call, tenant, "", space, b"", chain))
    assert isinstance(result, ReserveResult)
    shared.do(ev.AbortRequested(tenant, result.reservation_id))
    return result.reservation_id


def namespace(shared: Shared, tenant: int, number: int) -> int:
    model = (tenant << 32 | number).to_bytes(16)
    identity = NamespaceIdentity(model, GEOMETRY, domain=DOMAINS[tenant])
    result = shared.ask(lambda call: ev.NamespaceRegistered(call, identity))
    assert isinstance(result, NamespaceResult)
    return result.namespace_id


KINDS = {
    "lease": (lease, 63),
    "pin": (pin, 63),
    "reservation": (reservation, 63),
    "namespace": (namespace, 32),
}


@pytest.mark.parametrize("kind", KINDS)
def test_ids_do_not_say_how_much_others_do(kind: str, record_property: Callable[[str, object], None]) -> None:
    draw, num_bits = KINDS[kind]
    shared = Shared({})
    shared.planner.check_integrity = list  # type: ignore[method-assign]  # after 3,000 events
    for tenant in (ACME, BOLT):
        shared.put(tenant, 0, 1)
    before = [draw(shared, ACME, number) for number in range(NUM_IDS)]
    for number in range(NUM_BETWEEN):
        draw(shared, BOLT, number)
    after = [draw(shared, ACME, NUM_IDS + number) for number in range(NUM_IDS)]
    told = before + after
    record_property("ids_between", NUM_BETWEEN)
    assert len(set(told)) == len(told)
    assert 0 < min(told) < max(told) < 1 << num_bits
    look_random(told, num_bits)
    look_random([(b - a) % (1 << num_bits) for a, b in pairwise(told)], num_bits)


def look_random(numbers: list[int], num_bits: int) -> None:
    """Every bit is set in about half of the numbers, and changes in about half of the steps: 5 sigma."""
    spread = 5 * len(numbers) ** 0.5 / 2
    for bit in range(num_bits):
        bits = [number >> bit & 1 for number in numbers]
        assert abs(sum(bits) - len(bits) / 2) < spread, f"bit {bit} is set {sum(bits)} times"
        changes = sum(a != b for a, b in pairwise(bits))
        assert abs(changes - len(bits) / 2) < spread, f"bit {bit} changes {changes} times"


def test_ids_follow_from_the_secret_and_from_nothing_else() -> None:
    first, again, other = (SecretIds(secret, "lease") for secret in (b"a", b"a", b"b"))
    drawn = [[ids.draw(()) for _ in range(300)] for ids in (first, again, other)]
    assert drawn[0] == drawn[1]
    assert set(drawn[0]).isdisjoint(drawn[2])
    assert set(drawn[0]).isdisjoint(SecretIds(b"a", "pin").draw(()) for _ in range(300))


def test_no_id_is_drawn_that_is_in_use() -> None:
    taken = {SecretIds(b"a", "lease").draw(())}
    assert SecretIds(b"a", "lease").draw(taken) not in taken


@settings(max_examples=200)
@given(st.binary(max_size=80), st.lists(st.integers(0, (1 << 32) - 1), unique=True, max_size=50))
def test_two_namespaces_never_get_one_id(secret: bytes, numbers: list[int]) -> None:
    found = [permuted_32(number, secret) for number in numbers]
    assert len(set(found)) == len(numbers)
    assert all(0 <= number < 1 << 32 for number in found)
