"""What the planner can say about itself: statistics, one block, session or lease, and its story.

Only reads. Kept apart from planner.py so that the file which decides stays short.
"""

from collections import Counter
from collections.abc import Sized
from dataclasses import fields
from itertools import islice
from typing import Any

from ...tiers.block import NO_PLACE, Geometry, Tier
from ...v1.shm import extent_of
from .catalog.catalog import NO_ROW
from .catalog.core_state import CoreState
from .catalog.states import State
from .catalog.story import Line
from .copying.copies import Copies
from .promotion.prefetch import Prefetches
from .requests.leases import LeaseTable
from .requests.pins import Pins
from .requests.sessions import Sessions

GEOMETRY_FIELDS = tuple(field.name for field in fields(Geometry) if field.init)
MAX_LEASES = 16  # shown of a block
MAX_HELD = 1 << 15  # fragments that leases hold, looked at for these: a few milliseconds


class Inspection:
    """Answers for `kvtier status`, `inspect` and `story`. Field names are stable."""

    def __init__(
        self,
        core: CoreState,
        copies: Copies,
        leases: LeaseTable,
        pins: Pins,
        sessions: Sessions,
        prefetching: Prefetches,
        waiting: Sized,
    ) -> None:
        self._core = core
        self._copies = copies
        self._leases = leases
        self._pins = pins
        self._sessions = sessions
        self._prefetching = prefetching
        self._waiting = waiting

    def statistics(self) -> dict[str, Any]:
        """Return the numbers of the whole appliance."""
        core = self._core
        return {
            "tiers": {tier: self._tier(tier) for tier in self._core.rooms},
            "num_blocks": self._core.catalog.num_blocks,
            "num_namespaces": len(self._core.catalog.namespaces),
            "num_sessions": len(self._sessions),
            "num_leases": len(self._leases),
            "num_pins": len(self._pins),
            "num_clients": len(self._leases.clients),
            "num_waiting": len(self._waiting),
            "num_copies_in_flight": len(self._copies),
            **self._prefetching.statistics(),
            "overdue_bytes": self._leases.overdue_bytes,
            "counters": dict(core.story.counters),
        }

    def block(self, namespace_id: int, prefix: bytes) -> dict[str, Any] | None:
        """Return everything about one block, named by its prefix hash or a unique beginning of it."""
        catalog = self._core.catalog
        namespace = catalog.namespaces.get(namespace_id)
        if namespace is None:
            return None
        row = namespace.rows.get(prefix, NO_ROW)
        if row == NO_ROW and len(prefix) >= 4:
            matches = [r for name, r in namespace.rows.items() if name.startswith(prefix)]
            row = matches[0] if len(matches) == 1 else NO_ROW
        if row == NO_ROW:
            return None
        parent = catalog.parent[row]
        return {
            "namespace_id": namespace_id,
            "prefix_hash": catalog.prefix_hash[row].hex(),
            "parent_hash": catalog.prefix_hash[parent].hex() if parent != NO_ROW else None,
            "position": catalog.position[row],
            "num_children": len(catalog.children(row)),
            "num_uses": catalog.num_uses[row],
            "last_used_s_ago": self._core.now - catalog.last_used[row],
            "num_keepers": catalog.num_keepers[row],
            "lease_ids": self._lease_ids(row),
            "floors": [floor.label for floor in self._core.pin_floors.get(row, [])],
            "fragments": [self._fragment(row, fragment) for fragment in catalog.fragments(row)],
        }

    def _lease_ids(self, row: int) -> list[int]:
        """Return leases that hold a block: the first, of those that hold the first MAX_HELD fragments."""
        catalog = self._core.catalog
        if not any(catalog.num_holds[tier][row] for tier in self._core.ladder.memory_tiers):
            return []
        fragments = catalog.fragments(row)
        leases = (lease for client in self._leases.clients.values() for lease in client.leases.values())
        held = ((lease.id, fragment) for lease in leases for fragment, _ in lease.held)
        holding = (number for number, fragment in islice(held, MAX_HELD) if fragment in fragments)
        return list(islice(dict.fromkeys(holding), MAX_LEASES))

    def namespaces(self, number: int) -> list[dict[str, Any]] | None:
        """Return tenant, size and geometry of the namespace of this number, or of all for 0."""
        found = self._core.catalog.namespaces.values()
        return [
            {
                "namespace_id": one.id,
                "namespace": one.identity.digest.hex(),
                "tenant": one.identity.domain,
                "num_blocks": len(one.rows),
                "geometry": {name: getattr(one.identity.geometry, name) for name in GEOMETRY_FIELDS},
            }
            for one in found
            if number in (0, one.id)
        ] or None

    def session(self, session_id: str) -> dict[str, Any] | None:
        """Return what a session holds, and where."""
        sessions, catalog = self._sessions, self._core.catalog
        session = sessions.get(session_id)
        if session is None:
            return None
        where = Counter(catalog.tier_of(row) for row in sessions.rows(session))
        return {
            "session_id": session.id,
            "client_id": session.client,
            "urgency": session.urgency.name.lower(),
            "num_blocks": sum(where.values()),
            "blocks_by_tier": {tier.label if tier is not None else "miss": n for tier, n in where.items()},
            "idle_s": self._core.now - session.last_active,
        }

    def lease(self, lease_id: int) -> dict[str, Any] | None:
        """Return what a lease holds, and for how long."""
        lease = self._leases.get(lease_id)
        if lease is None:
            return None
        catalog = self._core.catalog
        return {
            "lease_id": lease.id,
            "client_id": lease.client.id,
            "client_name": lease.client.name,
            "ttl_s": lease.deadline_at - self._core.now,
            "is_overdue": lease.is_overdue,
            "num_fragments": len(lease.held),
            "num_bytes": sum(catalog.length_of(fragment) for fragment, _ in lease.held),
        }

    def segment(self, number: int) -> dict[str, Any] | None:
        """Return the books of one segment of the cold store."""
        log = self._core.log
        if log is None or not 0 <= number < len(log.segments):
            return None
        segment = log.segments[number]
        return {
            "segment": number,
            "state": segment.state.value,
            "num_live": segment.num_live,
            "num_landing": segment.num_landing,
            "live_bytes": segment.live_bytes,
            "written_pages": segment.next_page,
        }

    def story(self, namespace_id: int, prefix: bytes) -> list[Line]:
        """Return the story of a block, known now or forgotten already."""
        block = self.block(namespace_id, prefix)
        return self._core.story.of(bytes.fromhex(block["prefix_hash"]) if block else prefix, namespace_id)

    def _tier(self, tier: Tier) -> dict[str, int]:
        core = self._core
        return {
            "capacity_bytes": self._core.rooms[tier].statistics().capacity_bytes,
            "used_bytes": core.transitions.resident_bytes[tier],
            "reserved_bytes": core.transitions.arriving_bytes[tier],
            "condemned_bytes": core.transitions.condemned_bytes[tier],
            "pinned_bytes": self._pins.pinned_bytes(tier),
            "num_fragments": core.transitions.num_resident[tier],
        }

    def _fragment(self, row: int, fragment: int) -> dict[str, Any]:
        catalog = self._core.catalog
        label = catalog.label_of(fragment)
        return {
            "group": label.group,
            "raw_bytes": label.raw_length,
            "checksum": label.checksum.hex(),
            "places": {
                tier.label: {
                    "state": State(catalog.state[tier][fragment]).name.lower(),
                    "container": extent_of(catalog.place[tier][fragment]),
                    "holds": catalog.holds[tier][fragment],
                }
                for tier in self._core.ladder.tiers
                if catalog.place[tier][fragment] != NO_PLACE
            },
        }
