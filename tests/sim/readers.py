"""How bytes are read: in place under a lease, or one-sidedly, believed when nothing changed meanwhile."""

from typing import TYPE_CHECKING

from kvtier.appliance.core.results import ReadyFragment
from kvtier.tiers.block import NamespaceIdentity

from .memory import key_of
from .oracle import Key
from .world import Violation

if TYPE_CHECKING:
    from .acquiring import Acquire
    from .clients import Crowd
    from .requests import Client


def read_under_lease(acquire: "Acquire", ready: ReadyFragment, key: Key) -> None:
    """Read one reported fragment, some time later. What a local client holds must not change at all; for
    a remote one the service reads, and believes it only when the generation is what it was."""
    world = acquire.world
    slot = acquire.daemon.memories[ready.tier].slot(ready.place)
    generation = slot.generation
    if slot.label is None or key_of(slot.label) != key:
        raise Violation("visible means valid", f"a reply names slot {ready.place:#x} for another fragment")
    acquire.num_reads += 1

    def finish() -> None:
        acquire.num_reads -= 1
        if not acquire.daemon.is_alive or not acquire.client.is_alive:
            return
        is_unchanged = slot.generation == generation
        is_excused = slot.token in acquire.crowd.contents.doomed  # its bytes stay; nobody else finds them
        is_excused |= acquire.daemon.memories[ready.tier].is_lost  # with the device it was on
        if acquire.client.is_local and not is_unchanged and not is_excused:
            raise Violation("lease", f"slot {ready.place:#x} changed under lease {acquire.lease_id}")
        if is_unchanged:
            acquire.crowd.contents.must_be(slot.token, key, f"lease {acquire.lease_id}")
            world.counts["reads_verified"] += 1

    world.after(world.spread(0.01), finish)


def read_one_sided(
    crowd: "Crowd", client: "Client", namespace_id: int, identity: NamespaceIdentity, path: list[bytes]
) -> None:
    """Look a chain up in the shared index and copy it, without a lease and without asking anybody."""
    daemon, world = crowd.daemon, crowd.world
    domain = daemon.planner.domain_number(client.domain)
    for prefix_hash in path:
        for group in range(identity.geometry.num_groups):
            key = (identity.digest, prefix_hash, group)
            for memory in daemon.memories.values():
                places = memory.index.get(domain, {}).get(key)
                if places:
                    _copy_one_sided(crowd, memory.slot(next(iter(places))), key)
                    break
            else:
                world.counts["one_sided_misses"] += 1
                return


def _copy_one_sided(crowd: "Crowd", slot: "object", key: Key) -> None:
    from .memory import Slot

    assert isinstance(slot, Slot)
    world = crowd.world
    generation = slot.generation
    if generation % 2 or slot.label is None or key_of(slot.label) != key:
        return
    seen: list[int] = []
    duration_s = world.spread(0.02)
    began_before = not crowd.contents.is_buried(slot.token)  # the erasure of its tenant

    def copy() -> None:
        seen.append(slot.token)

    def finish() -> None:
        is_same = slot.generation == generation and slot.label is not None and key_of(slot.label) == key
        if is_same:
            crowd.contents.must_be(seen[0], key, "one-sided read, validated", may_be_erased=began_before)
            world.counts["one_sided_verified"] += 1

    world.after(duration_s * world.random(), copy)
    world.after(duration_s, finish)
