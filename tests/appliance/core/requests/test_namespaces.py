"""Namespaces: a limit that is divided among tenants, and given back by those that nothing is stored in."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from kvtier.appliance.core import events as ev
from kvtier.appliance.core.instructions import ForgetNamespace
from kvtier.appliance.core.requests import request_registry
from kvtier.appliance.core.results import NamespaceResult, PutOutcome, Refusal
from kvtier.tiers.block import NamespaceIdentity
from kvtier.tiers.cold.recovery import RECORD, RecoveredStore
from tests.records import columns

from ..rig import CLIENT, GEOMETRY, Rig, hashes

Record = Callable[[str, object], None]


def identity_of(number: int, domain: str = "") -> NamespaceIdentity:
    return NamespaceIdentity(number.to_bytes(16), GEOMETRY, domain=domain)


def register(rig: Rig, number: int, domain: str = "") -> Any:
    call = rig.call()
    rig.do(ev.NamespaceRegistered(call, identity_of(number, domain)))
    return rig.answer(call)


def put(rig: Rig, name: str) -> bytes:
    call = rig.start_put(hashes(name, 1))
    rig.settle()
    return bytes(rig.answer(call).outcomes)


def test_namespaces_that_nothing_is_stored_in_are_forgotten_for_new_ones() -> None:
    rig = Rig(max_namespaces=4)
    assert put(rig, "kept") == bytes([PutOutcome.STORED])
    ids = {rig.namespace_id}
    for number in range(20):
        result = register(rig, number)
        assert isinstance(result, NamespaceResult), result
        ids.add(result.namespace_id)
    assert len(ids) == 21  # no id named two of them
    assert len(rig.planner.catalog.namespaces) == 4
    found = rig.planner.lookup(rig.namespace_id, hashes("kept", 1))
    assert not isinstance(found, Refusal)
    assert found.num_blocks == 1


def test_a_client_with_the_id_of_a_forgotten_namespace_is_told_to_register_it_again() -> None:
    rig = Rig(max_namespaces=1)
    before = rig.namespace_id
    assert isinstance(register(rig, 1), NamespaceResult)
    forgotten = [one for one in rig.instructions if isinstance(one, ForgetNamespace)]
    assert [one.identity.model_digest for one in forgotten] == [b"m" * 16]
    call = rig.start_put(hashes("a", 1))
    assert rig.answer(call).reason == "UNKNOWN_NAMESPACE"
    call = rig.call()
    rig.do(ev.NamespaceRegistered(call, NamespaceIdentity(b"m" * 16, GEOMETRY)))
    rig.namespace_id = rig.answer(call).namespace_id
    assert rig.namespace_id != before
    assert put(rig, "a") == bytes([PutOutcome.STORED])


def test_a_tenant_in_place_of_a_forgotten_namespace_evicts_no_other_tenants_blocks() -> None:
    """There were as many namespaces as before, so its put emptied memory in which it got no room."""
    rig = Rig(dram_blocks=2, nvme_blocks=0, num_extents=2, max_namespaces=2)
    register(rig, 1)
    for name in "abcde":
        put(rig, name)
    register(rig, 2, "tenant:acme")
    assert len(rig.planner.catalog.namespaces) == 2
    num_found = sum(rig.found(hashes(name, 1)) for name in "abcde")
    own, rig.namespace_id = rig.namespace_id, max(rig.planner.catalog.namespaces)
    rig.client = 2
    rig.do(ev.ClientOpened(rig.client, "acme", True, "tenant:acme"))
    call = rig.start_put(hashes("a", 1))
    rig.namespace_id = own
    assert call not in rig.answers
    assert num_found == sum(rig.found(hashes(name, 1)) for name in "abcde") == 4


def test_a_namespace_that_a_put_is_under_way_into_is_not_forgotten() -> None:
    rig = Rig(max_namespaces=1)
    call = rig.call()
    rig.do(ev.ReserveRequested(call, CLIENT, "", rig.namespace_id, b"", hashes("a", 1)))
    refused = register(rig, 1)
    assert (refused.reason, refused.retry_after_s) == ("TOO_MANY_NAMESPACES", 1.0)
    assert "max_namespaces" in refused.message
    rig.do(ev.AbortRequested(CLIENT, rig.answer(call).reservation_id))
    assert isinstance(register(rig, 1), NamespaceResult)


def test_one_tenant_does_not_take_all_namespaces(record_property: Record) -> None:
    """Before: 1,023 of 1,024 by one tenant, and every other one was refused until a restart."""
    rig = Rig(dram_blocks=64, nvme_blocks=0, max_namespaces=16, num_tenants=2)
    domain = "tenant:greedy"
    rig.do(ev.ClientOpened(2, "", True, domain))
    held = 0
    for number in range(100, 130):
        result = register(rig, number, domain)
        if isinstance(result, Refusal):
            assert f"the tenant has {held} " in result.message
            break
        call = rig.call()
        names = hashes(f"greedy {number}", 1)
        reserve = ev.ReserveRequested(call, 2, "", result.namespace_id, b"", names)
        rig.do(ev.CommitRequested(call, 2, "", 0, [(0, GEOMETRY.block_bytes)], reserve))
        rig.settle()
        held += 1
    record_property("namespaces_of_a_tenant", held)
    assert held == 8
    for number in range(4):
        assert isinstance(register(rig, number, "tenant:other"), NamespaceResult)


def test_a_namespace_that_was_not_used_for_long_makes_place() -> None:
    """Before: each sync of an engine's weights left one, and the 1,024th was refused until an administrator
    evicted."""
    rig = Rig(dram_blocks=64, nvme_blocks=8, max_namespaces=4)
    ids, names = [rig.namespace_id], [hashes(str(number), 1) for number in range(4)]
    for number in range(1, 4):
        ids.append(register(rig, number).namespace_id)
    rig.tick(1.0)
    for rig.namespace_id, name in zip(ids, names, strict=True):
        rig.put(name)
    refused = register(rig, 4)
    assert (refused.reason, refused.retry_after_s) == ("TOO_MANY_NAMESPACES", 1.0)
    assert not rig.planner.is_busy, "all of them were used a moment ago"
    rig.tick(request_registry.IDLE_S)
    rig.do(ev.Touched(CLIENT, ids[0], names[0]))
    assert isinstance(register(rig, 4), Refusal)
    rig.settle()  # its copy into nvme, which had begun
    assert isinstance(register(rig, 4), NamespaceResult), "the next try finds a place"
    found = [rig.planner.lookup(*one) for one in zip(ids, names, strict=True)]
    assert [one.reason if isinstance(one, Refusal) else one.num_blocks for one in found] == [
        1,
        "UNKNOWN_NAMESPACE",  # it was used longest ago
        1,
        1,
    ]


def test_no_namespace_of_another_tenant_is_forgotten_in_vain() -> None:
    """Before: all that were unused, and then the one that was beyond its share was refused all the same."""
    rig = Rig(dram_blocks=64, nvme_blocks=0, max_namespaces=16, num_tenants=2)
    greedy, other = "tenant:greedy", "tenant:other"
    theirs = {register(rig, number, other).namespace_id for number in range(3)}
    rig.do(ev.ClientOpened(2, "", True, greedy))
    for number in range(100, 130):
        result = register(rig, number, greedy)
        if isinstance(result, Refusal):
            break
        call = rig.call()
        rig.do(ev.ReserveRequested(call, 2, "", result.namespace_id, b"", hashes(f"greedy {number}", 1)))
    else:
        raise AssertionError("no share")
    assert result.reason == "TOO_MANY_NAMESPACES"
    assert theirs <= rig.planner.catalog.namespaces.keys()


def test_unused_namespaces_of_others_make_place_for_a_tenant_within_its_share() -> None:
    rig = Rig(max_namespaces=4)
    theirs = [register(rig, number, "tenant:other").namespace_id for number in range(3)]
    assert isinstance(register(rig, 3, "tenant:new"), NamespaceResult)
    left = [number for number in theirs if number in rig.planner.catalog.namespaces]
    assert len(rig.planner.catalog.namespaces) == 4
    assert len(left) >= 2


def test_a_start_forgets_namespaces_without_records(record_property: Record) -> None:
    """Before: `max_namespaces` counted what was ever stored."""
    rig = Rig(max_namespaces=4)
    stored = [identity_of(number) for number in range(100)]
    assert (
        rig.planner.adopt(RecoveredStore(stored, columns(np.zeros(0, RECORD)), [], Counter()), rig.now) == 0
    )
    record_property("namespaces_after_a_start", len(rig.planner.catalog.namespaces) - 1)
    assert list(rig.planner.catalog.namespaces) == [rig.namespace_id]
    rig.tick()
    forgotten = [one.identity for one in rig.instructions if isinstance(one, ForgetNamespace)]
    assert forgotten == stored
