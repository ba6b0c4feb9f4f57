"""Rig: a planner with two hands. Copies wait until a test finishes them, well or badly."""

import hashlib
from collections.abc import Sequence
from typing import Any

from kvtier.appliance.core import events as ev
from kvtier.appliance.core.instructions import (
    Copy,
    FreeSegment,
    Instruction,
    Notify,
    Publish,
    Reply,
    Retract,
    SealSegment,
)
from kvtier.appliance.core.options import PlannerOptions
from kvtier.appliance.core.planner import Planner
from kvtier.appliance.core.results import PutOutcome, Refusal
from kvtier.policies.registry import PolicyChoice
from kvtier.tiers.base import Cause, CopyOutcome, Room
from kvtier.tiers.block import Geometry, NamespaceIdentity, Tier
from kvtier.tiers.cold.log import SegmentLog
from kvtier.tiers.ladder import ON_DEVICE, STANDARD, with_memory
from kvtier.tiers.memory.slots import SlotPool

SLOT_BYTES = 16 << 10
RECORD_BYTES = SLOT_BYTES + 4096
CLIENT = 1
STORED, NEEDED = PutOutcome.STORED, PutOutcome.NEEDED
#: Two layer groups, each fragment exactly one slot.
GEOMETRY = Geometry(8, 1, 64, 16, "float16", layers_per_group=4)


def hashes(name: str, count: int) -> list[bytes]:
    """Return the prefix hashes of a chain."""
    return [hashlib.sha256(f"{name}/{position}".encode()).digest() for position in range(count)]


class Rig:
    """`dram_blocks` blocks of two fragments fit an extent of dram, `nvme_blocks` a segment (0: no nvme)."""

    def __init__(
        self,
        dram_blocks: int = 4,
        nvme_blocks: int = 4,
        num_segments: int = 4,
        hbm_blocks: int = 0,
        hbm_is_shared: bool = True,
        policies: PolicyChoice | None = None,
        num_extents: int = 1,
        cxl_blocks: int = 0,
        **options: Any,
    ) -> None:
        ladder = STANDARD if hbm_is_shared else ON_DEVICE
        if cxl_blocks:
            ladder = with_memory(["cxl"], ladder)
        rooms: dict[Tier, Room] = {Tier.DRAM: SlotPool(num_extents, dram_blocks * 2 * SLOT_BYTES)}
        if hbm_blocks:
            rooms[Tier.HBM] = SlotPool(1, hbm_blocks * 2 * SLOT_BYTES)
        if nvme_blocks:
            rooms[ladder.log_tier] = SegmentLog(num_segments, nvme_blocks * 2 * RECORD_BYTES + 4096, 4096)
        settings: dict[str, Any] = {
            "high_watermark": 1.0,
            "low_watermark": 1.0,
            "max_pinned_fraction": 1.0,
            **options,
        }
        settings.setdefault("write", "spill")  # nothing is written that a test does not make necessary
        if cxl_blocks:
            rooms[ladder.named("cxl")] = SlotPool(1, cxl_blocks * 2 * SLOT_BYTES)
        self.planner = Planner(PlannerOptions(**settings), rooms, policies=policies, ladder=ladder)
        self.now = 0.0
        self.copies: list[Copy] = []  # not finished yet
        self.started: list[Copy] = []  # ever
        self.instructions: list[Instruction] = []  # of the last event
        self.answers: dict[int, list[Any]] = {}
        self.published: dict[tuple[Tier, int], bytes] = {}
        self.notices: list[Notify] = []
        self.sealed: list[int] = []
        self.to_free: list[int] | None = None  # segments, where a test frees them itself
        self._num_calls = 0
        self.client = CLIENT  # that requests are of
        self.do(ev.ClientOpened(self.client, "client", True, ""))
        call = self.call()
        self.do(ev.NamespaceRegistered(call, NamespaceIdentity(b"m" * 16, GEOMETRY)))
        self.namespace_id = self.answer(call).namespace_id

    # ------------------------------------------------------------------------------------ the shell

    def call(self) -> int:
        """Return a new call number."""
        self._num_calls += 1
        return self._num_calls

    def do(self, event: ev.Event) -> list[Instruction]:
        """Give the planner an event and carry out what it says; copies are only noted."""
        instructions = self.instructions = self.planner.handle(event, self.now)
        for instruction in instructions:
            match instruction:
                case Reply():
                    self.answers.setdefault(instruction.call, []).append(instruction.result)
                case Copy():
                    self.copies.append(instruction)
                    self.started.append(instruction)
                case Publish():
                    for place, label in zip(instruction.places, instruction.labels, strict=True):
                        assert (instruction.tier, place) not in self.published
                        self.published[instruction.tier, place] = label.prefix_hash
                case Retract():
                    for place in instruction.places:
                        del self.published[instruction.tier, place]
                case Notify():
                    self.notices.append(instruction)
                case SealSegment():
                    self.sealed.append(instruction.segment)
                case FreeSegment():
                    if self.to_free is None:
                        self.do(ev.SegmentFreed(instruction.segment))
                    else:
                        self.to_free.append(instruction.segment)
        assert not self.planner.check_integrity()
        return instructions

    def tick(self, seconds: float = 0.0) -> None:
        """Let time pass."""
        self.now += seconds
        self.do(ev.Tick())

    def finish(self, copy: Copy, cause: Cause | None = None) -> None:
        """End a copy."""
        self.copies.remove(copy)
        outcome = CopyOutcome(cause, b"" if cause else b"\7" * 16)
        self.do(ev.CopyFinished(copy.copy, [outcome] * len(copy.items)))

    def settle(self) -> None:
        """End every copy well, and those that follow from it."""
        while self.copies:
            self.finish(self.copies[0])

    def answer(self, call: int) -> Any:
        """Return the last answer to a call."""
        return self.answers[call][-1]

    # ------------------------------------------------------------------------------------- requests

    def start_put(
        self, chain: Sequence[bytes], parent: bytes = b"", request_id: str = "", **named: Any
    ) -> int:
        """Send a put in one step; return its call."""
        call = self.call()
        session_id = named.pop("session_id", "")
        reserve = ev.ReserveRequested(
            call, self.client, request_id, self.namespace_id, parent, chain, session_id, **named
        )
        spans = [(n * GEOMETRY.block_bytes, GEOMETRY.block_bytes) for n in range(len(chain))]
        self.do(ev.CommitRequested(call, self.client, request_id, 0, spans, reserve))
        return call

    def put(self, chain: Sequence[bytes], parent: bytes = b"", **named: Any) -> list[int]:
        """Put a chain and let everything land; return the outcomes."""
        call = self.start_put(chain, parent, **named)
        self.settle()
        while call not in self.answers and self.planner.is_busy:  # a long one takes several steps
            self.tick()
            self.settle()
        return list(self.answer(call).outcomes)

    def put_new(self, name: str, count: int, **named: Any) -> list[bytes]:
        """Put a new chain, as `put` does; return it."""
        chain = hashes(name, count)
        self.put(chain, **named)
        return chain

    def cool_new(self, name: str, count: int, **named: Any) -> list[bytes]:
        """Put a new chain and push it into nvme; return it."""
        chain = self.put_new(name, count, **named)
        self.cool(chain)
        return chain

    def reserve(self, chain: Sequence[bytes], parent: bytes = b"", request_id: str = "") -> int:
        """Send the first half of a put; return its call."""
        call = self.call()
        self.do(ev.ReserveRequested(call, self.client, request_id, self.namespace_id, parent, chain))
        return call

    def commit(self, reservation_id: int, num_blocks: int, request_id: str = "") -> int:
        """Send the second half; return its call."""
        call = self.call()
        spans = [(n * GEOMETRY.block_bytes, GEOMETRY.block_bytes) for n in range(num_blocks)]
        self.do(ev.CommitRequested(call, self.client, request_id, reservation_id, spans))
        return call

    def acquire(self, chain: Sequence[bytes], request_id: str = "", **named: Any) -> int:
        """Send an acquire; return its call."""
        call = self.call()
        self.do(ev.AcquireRequested(call, self.client, request_id, self.namespace_id, chain, **named))
        return call

    def release(self, call: int) -> None:
        """Release the lease an acquire was given."""
        self.do(ev.ReleaseRequested(None, self.client, [self.answer(call).lease_id]))

    def found(self, chain: Sequence[bytes]) -> int:
        """Return how many blocks of a chain a lookup finds."""
        result = self.planner.lookup(self.namespace_id, chain)
        assert not isinstance(result, Refusal)
        return result.num_blocks

    def where(self, prefix_hash: bytes) -> set[str]:
        """Return the tiers in which a block is complete."""
        catalog = self.planner.catalog
        row = catalog.find(self.namespace_id, prefix_hash)
        num_groups = GEOMETRY.num_groups
        return {
            t.label for t in catalog.ladder.tiers if row >= 0 and catalog.num_resident[t][row] == num_groups
        }

    def cool(self, chain: Sequence[bytes]) -> None:
        """Push a chain out of dram, into nvme."""
        call = self.call()
        self.do(ev.AcquireRequested(call, self.client, "", self.namespace_id, chain, "cooler"))
        self.settle()
        self.release(call)
        self.do(ev.SessionEnded(self.call(), self.client, "cooler", True))
        self.settle()
        self.do(ev.EvictRequested(self.call(), Tier.DRAM, 0))
        assert all(self.where(prefix_hash) == {"nvme"} for prefix_hash in chain)
