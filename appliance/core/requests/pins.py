"""Pins: blocks kept in a floor tier or faster until a deadline, also when the client that asked is gone.

Unlike a lease a pin belongs to no client and names no place: the block may move, as long as it stays at or
above its floor. That is what a shared system prompt needs.
"""

import heapq
from dataclasses import dataclass

from ....tiers.block import Tier, tenant_of
from ..catalog.catalog import NO_ROW
from ..catalog.core_state import CoreState
from ..catalog.residency import Residency
from ..secret_ids import SecretIds

SLACK = 1024  # ends of pins that are over already, not worth a new heap: one may have been for a week


@dataclass(slots=True)
class PinEntry:
    """One pin on a chain of blocks."""

    id: int
    floor: Tier
    deadline_at: float
    blocks: list[int]  # handles
    num_bytes: int
    domain: str  # isolation domain of the blocks


class Pins:
    """All pins, bounded in number and, per tier, in bytes."""

    def __init__(self, core: CoreState, residency: Residency) -> None:
        self._core = core
        self._residency = residency

        self._pins: dict[int, PinEntry] = {}
        self._deadlines: list[tuple[float, int]] = []
        self._ids = SecretIds(core.secret, "pin")
        self.pinned_bytes = dict.fromkeys(core.ladder.tiers, 0)
        self.bytes_of_tenant: dict[str, int] = {}  # of tenants that have pins

    def __len__(self) -> int:
        return len(self._pins)

    def room_for(self, floor: Tier, num_bytes: int) -> bool:
        """Whether so many more bytes may be pinned in a tier."""
        if len(self._pins) >= self._core.options.max_pins or floor not in self._core.rooms:
            return False
        rooms, fraction = self._core.rooms, self._core.options.max_pinned_fraction
        pinned = {floor: self.pinned_bytes[floor]}
        # What does not reach its floor is kept below, in the slowest tier at the latest.
        pinned[max(rooms)] = sum(self.pinned_bytes.values())
        return all(
            pinned_bytes + num_bytes <= fraction * rooms[tier].statistics().capacity_bytes
            for tier, pinned_bytes in pinned.items()
        )

    def pin(self, rows: list[int], floor: Tier, ttl_s: float) -> PinEntry:
        """Pin blocks; bringing them up to the floor is the caller's business."""
        catalog = self._core.catalog
        num_bytes = sum(catalog.namespace_of(row).block_bytes for row in rows)
        deadline_at = self._core.now + ttl_s
        blocks = [catalog.handle(row) for row in rows]
        domain = catalog.namespace_of(rows[0]).identity.domain if rows else ""
        pin = PinEntry(self._ids.draw(self._pins), floor, deadline_at, blocks, num_bytes, domain)
        self._pins[pin.id] = pin
        heapq.heappush(self._deadlines, (deadline_at, pin.id))
        if len(self._deadlines) > 2 * len(self._pins) + SLACK:
            self._deadlines = sorted((one.deadline_at, one.id) for one in self._pins.values())
        self.pinned_bytes[floor] += num_bytes
        tenant = tenant_of(domain)
        self.bytes_of_tenant[tenant] = self.bytes_of_tenant.get(tenant, 0) + num_bytes
        for row in rows:
            self._core.pin_floors.setdefault(row, []).append(floor)
            story = self._core.story
            story.tell(self._core.now, catalog.prefix_hash[row], "pinned", floor.label)
        return pin

    def domain_of(self, pin_id: int) -> str | None:
        """Return the isolation domain of what a pin keeps, None when it is unknown."""
        pin = self._pins.get(pin_id)
        return pin.domain if pin is not None else None

    def unpin(self, pin_id: int) -> bool:
        """End a pin; False when it is unknown (which is not an error)."""
        core = self._core
        pin = self._pins.pop(pin_id, None)
        if pin is None:
            return False
        self.pinned_bytes[pin.floor] -= pin.num_bytes
        self.bytes_of_tenant[tenant_of(pin.domain)] -= pin.num_bytes
        residency = self._residency
        for handle in pin.blocks:
            row = core.catalog.row_of(handle)
            if row == NO_ROW:
                continue
            core.pin_floors[row].remove(pin.floor)
            if not core.pin_floors[row]:
                del core.pin_floors[row]
            for tier in self._core.ladder.tiers:
                residency.offer(row, tier)
        return True

    def expire(self, now: float) -> None:
        """End the pins past their deadline."""
        while self._deadlines and self._deadlines[0][0] <= now:
            self.unpin(heapq.heappop(self._deadlines)[1])

    def next_deadline(self) -> float | None:
        """When the next pin ends."""
        return self._deadlines[0][0] if self._deadlines else None

    def check_integrity(self) -> list[str]:
        """Audit: floors in the residency are exactly those of living pins."""
        expected: dict[int, list[Tier]] = {}
        for pin in self._pins.values():
            for handle in pin.blocks:
                row = self._core.catalog.row_of(handle)
                if row != NO_ROW:
                    expected.setdefault(row, []).append(pin.floor)
        by_tenant = dict.fromkeys(self.bytes_of_tenant, 0)
        for pin in self._pins.values():
            by_tenant[tenant_of(pin.domain)] += pin.num_bytes
        if by_tenant != self.bytes_of_tenant:
            return [f"pins: {self.bytes_of_tenant} bytes by tenant, their pins have {by_tenant}"]
        actual = {row: sorted(floors) for row, floors in self._core.pin_floors.items()}
        if actual != {row: sorted(floors) for row, floors in expected.items()}:
            return ["pins: floors of blocks are not those of the living pins"]
        return []
