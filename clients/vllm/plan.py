"""What the two halves of the connector tell each other, once per step.

    scheduler -> every worker    StepPlan    loads to start, saves to start
    every worker -> scheduler    Acks        saves that are over, with what became of them

Plain values: they are pickled between processes by the engine. A load names block ids of the engine and
hashes, never places in the appliance: the worker finds the places itself, one-sidedly, under the
scheduler's lease. Sending places was rejected: they would have to be validated by generation all the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from ..values.types import ExpectedBlocks, Retention
from .groups import NULL_BLOCK, Group


@dataclass(slots=True)
class Part:
    """Blocks of one KV cache group: block `first_block + i` of the chain is engine block `block_ids[i]`."""

    group: int
    hashes: bytes  # packed chain, from the start
    first_block: int
    block_ids: list[int]


def part_of(
    group: Group, hashes: Sequence[bytes], table: Sequence[int], first_token: int, end_token: int
) -> Part | None:
    """Return which blocks of a group to load: the last run of real ones (a window has no others).

    Of recurrent state it is the last one.

    Raises ValueError when the state has no place: without it the rest of the load would be wrong."""
    if group.is_recurrent:
        block_id = table[end_token // group.block_tokens - 1]
        if end_token % group.block_tokens or block_id == NULL_BLOCK:
            raise ValueError(f"no place for the state at token {end_token} of KV cache group {group.index}")
        return Part(group.index, group.name_of(hashes, end_token), 0, [block_id])
    first, end = group.num_blocks(first_token), group.num_blocks(end_token)
    block_ids = list(table[first:end])
    if NULL_BLOCK in block_ids:
        last_null = len(block_ids) - 1 - block_ids[::-1].index(NULL_BLOCK)
        first += last_null + 1
        block_ids = block_ids[last_null + 1 :]
    if not block_ids:
        return None
    if not group.is_chain:  # what is before them need not be stored
        return Part(group.index, b"".join(group.chain(hashes)[first:end]), 0, block_ids)
    return Part(group.index, b"".join(group.chain(hashes)[:end]), first, block_ids)


@dataclass(slots=True)
class Load:
    """Fill a request's blocks from the appliance. Without parts it only ends, as failed.

    `block_ids` are the first group's: what an engine is told that does not take failed requests."""

    request_id: str
    session: str
    block_ids: list[int] = field(default_factory=list)
    adapter: bytes = b""
    parts: list[Part] = field(default_factory=list)
    is_arriving: bool = False  # some of it is still on its way up from nvme: this load has to wait for it
    expected: ExpectedBlocks | None = None  # some of it is still being computed elsewhere


@dataclass(slots=True)
class Save:
    """Store blocks of one request and group; `hashes` are those of `block_ids`, `parent` is before them."""

    job: int
    group: int
    session: str
    parent: bytes
    hashes: bytes
    block_ids: list[int]
    adapter: bytes = b""
    retention: tuple[Retention, ...] = ()
    prefill_share: float = 0.0  # of the step's time that computing these blocks took; 0: unknown


@dataclass(slots=True)
class StepPlan:
    """Everything workers shall start in one step. `salt` is part of every namespace (see reset_cache)."""

    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    salt: str = ""


class Again(IntEnum):
    """What of a save that did not store everything is worth another try, least first."""

    NOTHING = 0  # no daemon answers
    REST = 1  # there was no room
    ALL = 2  # what came before it is not stored any more: from the start of the chain


@dataclass(slots=True)
class Ack:
    """How a save ended on the ranks that have reported: blocks from its start that are stored on all."""

    num_ranks: int
    num_stored: int
    again: Again = Again.NOTHING


@dataclass(slots=True)
class Acks:
    """Saves that are over, by job."""

    by_job: dict[int, Ack] = field(default_factory=dict)

    def add(self, other: "Acks") -> None:
        """Take in what another rank, or a later step, reported."""
        for job, ack in other.by_job.items():
            mine = self.by_job.get(job)
            if mine is None:
                self.by_job[job] = Ack(ack.num_ranks, ack.num_stored, ack.again)
                continue
            mine.num_ranks += ack.num_ranks
            mine.num_stored = min(mine.num_stored, ack.num_stored)
            mine.again = max(mine.again, ack.again)
