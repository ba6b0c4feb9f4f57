"""Pins: blocks kept in a floor tier or faster until a deadline, also when the client that asked is gone.

Unlike a lease a pin belongs to no client and names no place: the block may move, as long as it stays at or
above its floor. That is what a shared system prompt needs.
"""

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ....tiers.block import Tier, tenant_of
from ..catalog.catalog import NO_ROW
from ..catalog.core_state import CoreState
from ..catalog.residency import Residency
from ..secret_ids import SecretIds
from ..shares import Shares

SLACK = 1024  # ends of pins that are over already, not worth a new heap: one may have been for a week


@dataclass(slots=True)
class PinEntry:
    """One pin on a chain of blocks."""

    id: int
    floor: Tier
    deadline_at: float
    blocks: list[int]  # handles
    block_bytes: int
    domain: str  # isolation domain of the blocks

    @property
    def is_done(self) -> bool:
        """True: a pin is answered at once."""
        return True


class Pins:
    """All pins, bounded in blocks and, per tier, in bytes. Of both each tenant has a share.

    The bytes of a block that several pins keep in one tier count once.
    """

    def __init__(self, core: CoreState, residency: Residency) -> None:
        self._core = core
        self._residency = residency

        self._pins: dict[int, PinEntry] = {}
        self._deadlines: list[tuple[float, int]] = []
        self._ids = SecretIds(core.secret, "pin")
        self._num_pins: Counter[tuple[int, Tier]] = Counter()  # by block (its handle) and floor
        self._blocks = Shares(core.options.max_pinned_blocks, core.options.num_tenants)
        self._all_bytes = Shares(0, core.options.num_tenants)  # of all floors together
        self._bytes = {tier: Shares(0, core.options.num_tenants) for tier in core.ladder.tiers}

    def __len__(self) -> int:
        return len(self._pins)

    def pinned_bytes(self, floor: Tier) -> int:
        """Return the bytes of blocks that are kept in `floor` or faster."""
        return self._bytes[floor].taken

    def bytes_of_tenant(self, tenant: str) -> int:
        """Return the bytes of blocks that a tenant's pins keep."""
        return self._all_bytes.held(tenant)

    def new_bytes(self, rows: Sequence[int], floor: Tier) -> int:
        """Return the bytes of those of these blocks that no pin keeps in `floor` yet."""
        catalog = self._core.catalog
        return sum(
            catalog.block_bytes(row) for row in rows if (catalog.handle(row), floor) not in self._num_pins
        )

    def objection(self, rows: Sequence[int], floor: Tier, tenant: str) -> str:
        """Return why a tenant may not pin these blocks, in words; empty: it may."""
        options, floors = self._core.options, self._core.rooms
        self._blocks.resize(options.max_pinned_blocks, options.num_tenants)
        if not self._blocks.may_take(tenant, max(1, len(rows))):
            return (
                f"max_pinned_blocks: the tenant's pins have {self._blocks.held(tenant)} blocks, its share of "
                f"{options.max_pinned_blocks}; unpin some"
            )
        # What does not reach its floor is kept below, in the slowest tier at the latest.
        new_bytes = self.new_bytes(rows, floor)
        for tier, share in ((floor, self._bytes[floor]), (max(floors), self._all_bytes)):
            allowed_bytes = int(options.max_pinned_fraction * floors[tier].statistics().capacity_bytes)
            share.resize(allowed_bytes, options.num_tenants)
            if not share.may_take(tenant, new_bytes):
                return (
                    f"limits.max_pinned: the tenant's pins keep {share.held(tenant)} bytes in {tier.label}, "
                    f"its share of {allowed_bytes}; unpin some, or raise the limit or the tier"
                )
        return ""

    def pin(self, rows: list[int], floor: Tier, ttl_s: float, domain: str) -> PinEntry:
        """Pin blocks of one namespace of `domain`; bringing them up to the floor is the caller's business."""
        catalog = self._core.catalog
        deadline_at = self._core.now + ttl_s
        blocks = [catalog.handle(row) for row in rows]
        block_bytes = catalog.block_bytes(rows[0]) if rows else 0
        pin = PinEntry(self._ids.draw(self._pins), floor, deadline_at, blocks, block_bytes, domain)
        self._pins[pin.id] = pin
        heapq.heappush(self._deadlines, (deadline_at, pin.id))
        if len(self._deadlines) > 2 * len(self._pins) + SLACK:
            self._deadlines = sorted((one.deadline_at, one.id) for one in self._pins.values())
        self._count(pin, 1)
        for row in rows:
            self._core.pin_floors.setdefault(row, []).append(floor)
            self._core.tell(row, "pinned", floor.label)
        return pin

    def _count(self, pin: PinEntry, number: int) -> None:
        """Count a pin (1), or that it ended (-1), in its tenant's shares."""
        tenant, num_changed = tenant_of(pin.domain), 0
        for handle in pin.blocks:
            key = handle, pin.floor
            self._num_pins[key] += number
            if self._num_pins[key] == max(0, number):  # the first one came or the last one went
                num_changed += number
                if number < 0:
                    del self._num_pins[key]
        for share in (self._bytes[pin.floor], self._all_bytes):
            share.add(tenant, num_changed * pin.block_bytes)
        self._blocks.add(tenant, number * max(1, len(pin.blocks)))

    def is_alive(self, pin: PinEntry) -> bool:
        """Return whether a pin has neither ended nor been ended."""
        return self._pins.get(pin.id) is pin

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
        self._count(pin, -1)
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
        kept: dict[tuple[Tier, str], dict[int, int]] = {}
        for pin in self._pins.values():
            of_tenant = kept.setdefault((pin.floor, tenant_of(pin.domain)), {})
            of_tenant.update(dict.fromkeys(pin.blocks, pin.block_bytes))
        expected_bytes = {key: sum(blocks.values()) for key, blocks in kept.items()}
        for (tier, tenant), num_bytes in expected_bytes.items():
            found = self._bytes[tier].held(tenant)
            if found != num_bytes:
                return [f"pins: {tenant!r} keeps {num_bytes} bytes in {tier.label}, counted {found}"]
        taken = [sum(share.taken for share in self._bytes.values()), self._all_bytes.taken]
        if taken != 2 * [sum(expected_bytes.values())]:
            return ["pins: bytes are counted that no pin keeps"]
        actual = {row: sorted(floors) for row, floors in self._core.pin_floors.items()}
        if actual != {row: sorted(floors) for row, floors in expected.items()}:
            return ["pins: floors of blocks are not those of the living pins"]
        return []
