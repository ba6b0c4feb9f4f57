"""What an earlier daemon left in memory: readable when its bytes were verified, and not before."""

from dataclasses import replace

from kvtier.appliance.core import events as ev
from kvtier.appliance.core.instructions import Reply
from kvtier.appliance.core.options import PlannerOptions
from kvtier.appliance.core.planner import Planner
from kvtier.appliance.core.results import NamespaceResult, Refusal
from kvtier.tiers.block import FragmentLabel, NamespaceIdentity, Tier
from kvtier.tiers.memory.slots import SlotPool
from kvtier.v1.shm import place_of

from ..rig import GEOMETRY, SLOT_BYTES, Rig, hashes

CHAIN = hashes("a", 3)


def rig_that_finds(namespace_id: int | None = None) -> tuple[Rig, list[tuple[int, FragmentLabel]]]:
    """A rig whose only extent has CHAIN in it, two slots a block; and that, as (slot, label)."""
    rig = Rig(dram_blocks=4, nvme_blocks=0)
    room = rig.planner.rooms[Tier.DRAM]
    assert isinstance(room, SlotPool)
    room.hold([0])
    number = rig.namespace_id if namespace_id is None else namespace_id
    found = []
    for slot in range(2 * len(CHAIN)):
        block, group = divmod(slot, 2)
        parent = CHAIN[block - 1] if block else b""
        checksum = bytes([slot]) * 16
        label = FragmentLabel(bytes(32), number, CHAIN[block], parent, block, group, SLOT_BYTES, checksum)
        found.append((slot, label))
    rig.do(ev.ExtentFound(Tier.DRAM, 0, rig.planner.found_memory.takes(found)))
    return rig, [(place_of(0, slot), label) for slot, label in found]


def verify(rig: Rig, found: list[tuple[int, FragmentLabel]], is_right: bool = True) -> None:
    """Tell the planner what was verified. An earlier daemon published all of it."""
    if not is_right:
        rig.published |= {(Tier.DRAM, place): label.prefix_hash for place, label in found}
    rig.do(ev.FoundVerified(Tier.DRAM, found, [is_right] * len(found)))


def unverified(rig: Rig, chain: list[bytes]) -> list[int]:
    found = rig.planner.found_memory.unverified(rig.namespace_id, chain)
    assert all(rig.planner.found_memory.waits_for(*one) for one in found)
    return [place for _, place, _ in found]


def test_blocks_are_readable_one_by_one_as_they_are_verified() -> None:
    rig, found = rig_that_finds()
    assert unverified(rig, CHAIN) == list(range(6))
    assert not rig.where(CHAIN[0])
    verify(rig, found[2:4])  # the second block first, as a get may want it
    assert unverified(rig, CHAIN) == [0, 1, 4, 5]
    verify(rig, found)
    assert unverified(rig, CHAIN) == []
    assert [rig.where(name) for name in CHAIN] == [{"dram"}] * 3
    assert rig.planner.lookup(rig.namespace_id, CHAIN).num_blocks == 3  # type: ignore[union-attr]


def test_slots_that_wait_are_nobody_elses() -> None:
    rig, found = rig_that_finds()
    other = hashes("b", 2)
    rig.put(other[:1])
    assert rig.where(other[0]) == {"dram"}
    verify(rig, found)
    assert [rig.where(name) for name in CHAIN] == [{"dram"}] * 3


def test_wrong_bytes_give_their_slot_back_and_are_never_published() -> None:
    rig, found = rig_that_finds()
    verify(rig, found[:2], is_right=False)
    verify(rig, found[2:])
    assert not rig.where(CHAIN[0])
    assert len(rig.published) == 4
    rig.put(hashes("b", 2))  # one finds room that was free, one what was given back
    assert [rig.where(name) for name in hashes("b", 2)] == [{"dram"}] * 2


def test_a_verdict_that_comes_twice_or_late_changes_nothing() -> None:
    rig, found = rig_that_finds()
    verify(rig, found)
    rig.do(ev.FoundVerified(Tier.DRAM, found, [False] * len(found)))
    assert [rig.where(name) for name in CHAIN] == [{"dram"}] * 3


def test_a_block_that_was_put_again_meanwhile_stays_as_it_was_put() -> None:
    rig, found = rig_that_finds()
    rig.put(CHAIN[:1])
    rig.published |= {(Tier.DRAM, place): label.prefix_hash for place, label in found[:2]}
    verify(rig, found)
    assert [rig.where(name) for name in CHAIN] == [{"dram"}] * 3
    assert len(rig.published) == 6


def test_fragments_of_no_namespace_are_not_waited_for() -> None:
    rig, _ = rig_that_finds(namespace_id=17)
    assert rig.planner.found_memory.unverified(17, CHAIN) == []
    rig.put(hashes("b", 4))
    assert all(rig.where(name) == {"dram"} for name in hashes("b", 4))


def test_an_extent_that_names_two_domains_is_not_taken() -> None:
    """Whichever had it could map the bytes of the other one."""
    rig, found = rig_that_finds()
    call = rig.call()
    other = NamespaceIdentity(b"o" * 16, GEOMETRY, domain="tenant:bolt")
    rig.do(ev.NamespaceRegistered(call, other))
    namespace_id = rig.answer(call).namespace_id
    takes = rig.planner.found_memory.takes
    assert takes(found) == found
    place, label = found[-1]
    assert takes([*found[:-1], (place, replace(label, namespace_id=namespace_id))]) == []
    assert takes([*found[:-1], (place, replace(label, raw_length=SLOT_BYTES - 1))]) == found[:-1]


def test_namespaces_that_memory_may_name_are_not_forgotten_before_it_was_read() -> None:
    """Before: until then they were without blocks, so one that registered others made them be forgotten."""
    planner = Planner(PlannerOptions(max_namespaces=2), {Tier.DRAM: SlotPool(1, 1 << 20)})
    kept = {7: NamespaceIdentity(b"a" * 16, GEOMETRY), 9: NamespaceIdentity(b"b" * 16, GEOMETRY)}
    planner.name_namespaces(kept)
    wanted = ev.NamespaceRegistered(1, NamespaceIdentity(b"c" * 16, GEOMETRY))
    (refused,) = planner.handle(wanted, 0.0)
    assert isinstance(refused, Reply)
    assert isinstance(refused.result, Refusal)
    assert refused.result.reason == "TOO_MANY_NAMESPACES"
    assert planner.identities() == kept
    planner.found_memory.awaited.clear()
    (granted,) = planner.handle(wanted, 0.0)
    assert isinstance(granted, Reply)
    assert isinstance(granted.result, NamespaceResult)
    assert 7 not in planner.identities()


def test_a_namespace_that_was_registered_again_has_its_later_id() -> None:
    """Before: the former one, and nothing was found under the later one."""
    planner = Planner(PlannerOptions(), {Tier.DRAM: SlotPool(1, 1 << 20)})
    one, other = NamespaceIdentity(b"a" * 16, GEOMETRY), NamespaceIdentity(b"b" * 16, GEOMETRY)
    planner.name_namespaces({7: one, 8: other, 9: one})
    assert planner.identities() == {8: other, 9: one}


def test_an_id_of_the_former_daemon_names_no_other_namespace() -> None:
    """Before: the id of one that was forgotten was drawn for another one, and a client that still had it was
    given the other model's blocks."""
    one, other = (NamespaceIdentity(digest * 16, GEOMETRY, domain="tenant:acme") for digest in (b"a", b"b"))

    def register(planner: Planner, identity: NamespaceIdentity) -> int:
        (answer,) = planner.handle(ev.NamespaceRegistered(1, identity), 0.0)
        assert isinstance(answer, Reply)
        assert isinstance(answer.result, NamespaceResult)
        return answer.result.namespace_id

    options, secret = PlannerOptions(max_namespaces=1), b"drawn again once in four thousand million"
    former = Planner(options, {Tier.DRAM: SlotPool(1, 1 << 20)}, secret=secret)
    number = register(former, one)
    planner = Planner(options, {Tier.DRAM: SlotPool(1, 1 << 20)}, secret=secret)
    planner.name_namespaces({number: one})
    planner.found_memory.awaited.clear()
    assert register(planner, other) != number
    assert number not in planner.identities()


def test_what_an_erased_tenant_had_is_not_taken() -> None:
    """A get of it would be answered after the administrator was told that nothing is left."""
    rig, found = rig_that_finds()
    call = rig.call()
    rig.do(ev.TenantErased(call, ""))
    assert rig.answer(call).count == 0
    rig.published |= {(Tier.DRAM, place): label.prefix_hash for place, label in found}
    verify(rig, found)
    assert rig.found(CHAIN) == 0
    assert not rig.published
    assert rig.planner.rooms[Tier.DRAM].statistics().taken_bytes == 0


def shrinking(*numbers: int) -> tuple[Rig, SlotPool]:
    """A rig with two extents of dram, of which these are held, that is to have one. And its room."""
    rig = Rig(dram_blocks=4, nvme_blocks=0, num_extents=2)
    room = rig.planner.rooms[Tier.DRAM]
    assert isinstance(room, SlotPool)
    room.hold(numbers)
    rig.do(ev.PolicyChanged(rig.planner.core.options, rig.planner.core.choice, {Tier.DRAM: 1}))
    return rig, room


def test_an_extent_that_may_hold_something_leaves_last() -> None:
    _, room = shrinking(1)
    assert room.extents() == [1]


def test_an_extent_that_leaves_stays_until_it_is_known_what_it_holds() -> None:
    rig, room = shrinking(0, 1)
    (leaving,) = room.leaving
    rig.do(ev.ExtentFound(Tier.DRAM, 1 - leaving, []))
    assert room.leaving == {leaving}
    label = FragmentLabel(bytes(32), rig.namespace_id, CHAIN[0], b"", 0, 0, SLOT_BYTES, bytes(16))
    rig.do(ev.ExtentFound(Tier.DRAM, leaving, [(0, label)]))
    verify(rig, [(place_of(leaving, 0), label)])
    rig.tick()
    rig.settle()
    assert not room.leaving
    assert set(rig.published) == {(Tier.DRAM, place_of(1 - leaving, 0))}, "it was moved"


def test_an_extent_that_leaves_and_holds_nothing_goes() -> None:
    rig, room = shrinking(0, 1)
    (leaving,) = room.leaving
    rig.do(ev.ExtentFound(Tier.DRAM, leaving, []))
    rig.tick()
    assert room.extents() == [1 - leaving]
