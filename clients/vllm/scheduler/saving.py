"""Which blocks to store, when, and what holds them meanwhile.

A block is saved in the step that fills it: a sliding window may give it away in the next one. Its engine
block is held by a reference of ours until every rank has acknowledged the save, so that a finished, aborted
or preempted request can go. What is stored, or under way, is not saved again, whichever engine computed it.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..counters import Counters
from ..groups import NULL_BLOCK, Group, alignment_of
from ..plan import Ack, Acks, Again, Save
from .sessions import Turn

MAX_KNOWN = 1 << 16  # block names remembered as stored
MIN_PREFILL_TOKENS = 256  # of one request in a step that is timed to learn how fast prompts are computed,
MIN_PREFILL_FRACTION = 0.9  # and of all that the step computes: a few others may decode meanwhile
MAX_RETRIES = 3  # of a request, when blocks are refused
NEVER = 1 << 62  # as the next block: nothing more of this group can be saved


class Holder(Protocol):
    """The engine's block pool, as far as it is needed here."""

    def hold(self, block_ids: Sequence[int]) -> None:
        """Take a reference on each block."""
        ...

    def free(self, block_ids: Sequence[int]) -> None:
        """Give the references back."""
        ...

    def has(self, name: bytes) -> bool:
        """Whether the engine's own prefix cache has the block of the first group."""
        ...


@dataclass(slots=True)
class Saving:
    """How far one request is saved: the next block of each group; `num_retries` is over all groups.

    `due_tokens` is how long it must be for a plan to have anything to do: most requests fill no block in most
    steps, and must cost nothing then. A change of `next_block` sets it to 0.
    """

    next_block: list[int]
    num_retries: int = 0
    due_tokens: int = 0
    num_prompt_tokens: int = 0  # 0: unknown


@dataclass(frozen=True, slots=True)
class StoredBlocks:
    """Blocks that are stored on every rank. `origin` and `adapter` are what `plan` or `seen` was given."""

    group: int
    first_block: int
    parent: bytes
    names: list[bytes]
    origin: Any
    adapter: bytes = b""


@dataclass(slots=True)
class _SaveJob:
    saving: Saving
    group: int
    first_block: int
    parent: bytes
    names: list[bytes]
    block_ids: list[int]
    ranks_left: int
    origin: Any
    adapter: bytes


class Saver:
    """Plans saves and settles them. `max_blocks` bounds what is held at a time."""

    def __init__(
        self, groups: Sequence[Group], num_ranks: int, max_blocks: int, holder: Holder, counters: Counters
    ) -> None:
        self._groups = list(groups)
        self._alignment = alignment_of(groups)
        self._num_ranks = num_ranks
        self._max_blocks = max_blocks
        self._holder = holder
        self._counters = counters
        self._jobs: dict[int, _SaveJob] = {}
        self._last_job = 0
        self._num_held = 0
        #: Called with blocks that every rank has, by a save or by a lookup; None: not wanted.
        self.on_stored: Callable[[StoredBlocks], None] | None = None
        self._known: OrderedDict[tuple[int, bytes], bool] = OrderedDict()  # True: stored, False: under way

    @property
    def is_busy(self) -> bool:
        """Whether saves are under way."""
        return bool(self._jobs)

    def plan(
        self,
        saving: Saving,
        hashes: Sequence[bytes],
        num_tokens: int,
        tables: Sequence[Sequence[int]],
        turn: Turn,
        adapter: bytes,
        origin: Any = None,
    ) -> list[Save]:
        """Return the saves of a request that has `num_tokens` tokens in the cache after this step.
        `tables` are its block tables, one per group. Advances `saving`; holds the blocks."""
        saves = []
        for group, table in zip(self._groups, tables, strict=True):
            if group.is_recurrent:
                continue  # save_state
            end = min(group.num_blocks(num_tokens), len(hashes) // group.hashes_per_block, len(table))
            first = saving.next_block[group.index]
            if end <= first:
                continue
            saving.next_block[group.index] = end
            for start, names, before in self._runs(group, saving, hashes, first, end):
                ids = list(table[start : start + len(names)])
                if not group.is_chain and NULL_BLOCK in ids:
                    continue  # given away; what comes behind it stands alone
                job = _SaveJob(
                    saving, group.index, start, before, names, ids, self._num_ranks, origin, adapter
                )
                num_named = len(names)
                if not self._start(job):
                    break
                named = b"".join(job.names)
                saves.append(
                    Save(
                        self._last_job,
                        group.index,
                        turn.session,
                        before,
                        named,
                        job.block_ids,
                        adapter,
                        turn.retention,
                    )
                )
                if len(job.names) < num_named:
                    break
        saving.due_tokens = min(
            ((saving.next_block[g.index] + 1) * g.block_tokens for g in self._groups if not g.is_recurrent),
            default=NEVER,
        )
        return saves

    def save_state(
        self, saving: Saving, name: bytes, group: int, block_id: int, turn: Turn, adapter: bytes
    ) -> list[Save]:
        """Return the save of a recurrent state under the name of its prefix; holds the block.

        It is the start of a chain of its own: states before it need not be stored."""
        if (group, name) in self._known or block_id == NULL_BLOCK:
            return []
        job = _SaveJob(saving, group, 0, b"", [name], [block_id], self._num_ranks, None, adapter)
        if not self._start(job):
            return []
        return [Save(self._last_job, group, turn.session, b"", name, [block_id], adapter, turn.retention)]

    def num_left(self, saving: Saving, num_tokens: int) -> int:
        """Return how many of the first blocks have not been planned, for want of room."""
        return sum(
            max(0, group.num_blocks(num_tokens) - saving.next_block[group.index])
            for group in self._groups
            if not group.is_recurrent
        )

    def settle(self, acks: Acks) -> list[StoredBlocks]:
        """Take in what workers reported; return what is stored on every rank now."""
        stored = []
        for number, ack in acks.by_job.items():
            job = self._jobs.get(number)
            if job is None:
                continue
            job.ranks_left -= ack.num_ranks
            if ack.num_stored < len(job.names):
                self._forget(job, ack.num_stored, ack.again)
            if job.ranks_left <= 0:
                del self._jobs[number]
                self._num_held -= len(job.block_ids)
                self._holder.free(job.block_ids)
                for name in job.names:
                    if (job.group, name) in self._known:
                        self._known[job.group, name] = True
                if job.names:
                    stored.append(
                        StoredBlocks(
                            job.group, job.first_block, job.parent, job.names, job.origin, job.adapter
                        )
                    )
        if self.on_stored is not None:
            for blocks in stored:
                if self._groups[blocks.group].is_chain:  # listeners know no others
                    self.on_stored(blocks)
        return stored

    def drop(self, saves: Sequence[Save]) -> None:
        """Give up saves that no worker has heard of."""
        self.settle(Acks({save.job: Ack(self._num_ranks, 0) for save in saves}))

    def seen(
        self, hashes: Sequence[bytes], stored: Sequence[int], origin: Any = None, adapter: bytes = b""
    ) -> None:
        """Correct what is remembered by what a lookup found: blocks behind its end have been evicted."""
        for group, num_stored in zip(self._groups, stored, strict=True):
            if group.is_recurrent:
                continue
            scale = group.hashes_per_block
            if not group.is_chain:  # what is behind the hit may be gone, and is put again
                for name in group.chain(hashes)[num_stored:]:
                    if self._known.get((group.index, name), False):
                        del self._known[group.index, name]
                continue
            if self.on_stored is not None and num_stored:
                names = group.chain(hashes)[:num_stored]
                self.on_stored(StoredBlocks(group.index, 0, b"", names, origin, adapter))
            for i in range(num_stored):
                self._known.setdefault((group.index, hashes[(i + 1) * scale - 1]), True)
            for i in range(num_stored, len(hashes) // scale):
                key = (group.index, hashes[(i + 1) * scale - 1])
                if not self._known.get(key, False):
                    break  # unknown, or under way: what comes behind it is no older
                del self._known[key]
        self._trim()

    def is_local(self, name: bytes) -> bool:
        """Whether the engine has a block of the first group itself."""
        return self._holder.has(name)

    def num_local_tokens(self, hashes: Sequence[bytes]) -> int:
        """Return about how many tokens the engine has itself. Blocks leave from the end: halving finds it."""
        if len(self._groups) > 1:
            return 0
        group = self._groups[0]
        chain = group.chain(hashes)
        low, high = 0, len(chain)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.is_local(chain[middle - 1]) else (low, middle - 1)
        return low * group.block_tokens

    def forget_all(self) -> None:
        """Remember nothing as stored; saves under way go on."""
        self._known.clear()

    def check_integrity(self) -> list[str]:
        """Audit: what is held belongs to a job."""
        held = sum(len(job.block_ids) for job in self._jobs.values())
        return [] if held == self._num_held else [f"saves hold {held} blocks, counted {self._num_held}"]

    def _runs(
        self, group: Group, saving: Saving, hashes: Sequence[bytes], first: int, end: int
    ) -> list[tuple[int, list[bytes], bytes]]:
        """Return the runs of blocks `first` to `end` that are neither stored nor under way, nor left out, as
        start, names, and name of the block before; empty where that one is left out."""
        prompt_end = max(0, saving.num_prompt_tokens - 1) // self._alignment * self._alignment
        runs: list[tuple[int, list[bytes], bytes]] = []
        before, is_open = b"", False
        for i in range(max(0, first - 1), end):
            key = group.index, hashes[(i + 1) * group.hashes_per_block - 1]
            is_kept = group.is_kept(i, prompt_end)
            is_known = key in self._known
            if is_known and i >= first:
                self._known.move_to_end(key)
            if is_open and is_kept and not is_known:
                runs[-1][1].append(key[1])
            elif is_kept and not is_known and i >= first:
                runs.append((i, [key[1]], before))
                is_open = True
            else:
                is_open = False
            before = key[1] if is_kept else b""
        return runs

    def _start(self, job: _SaveJob) -> bool:
        """Hold the job's blocks and number it; False when none of it can be saved now. What is too much for
        now is cut off, and left to a later step."""
        saving, group = job.saving, job.group
        if NULL_BLOCK in job.block_ids:  # given away before it was saved: nothing behind it can be stored
            self._counters.add("saves_skipped_gap", len(job.names))
            saving.next_block[group] = NEVER
            return False
        room = max(0, self._max_blocks - self._num_held)
        if room < len(job.block_ids):
            del job.names[room:], job.block_ids[room:]
            saving.next_block[group] = job.first_block + room
            if not room:
                return False
        self._holder.hold(job.block_ids)
        self._num_held += len(job.block_ids)
        self._last_job += 1
        self._jobs[self._last_job] = job
        for name in job.names:
            self._known[group, name] = False
        self._trim()
        return True

    def _trim(self) -> None:
        while len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)

    def _forget(self, job: _SaveJob, num_stored: int, again: Again) -> None:
        """The end of a job is not stored: a later step may try again, as long as the request lives."""
        for name in job.names[num_stored:]:
            self._known.pop((job.group, name), None)
        del job.names[num_stored:]
        saving = job.saving
        if again is Again.NOTHING or saving.num_retries >= MAX_RETRIES:
            return
        saving.num_retries += 1
        saving.due_tokens = 0
        first = job.first_block + num_stored if again is Again.REST else 0
        saving.next_block[job.group] = min(saving.next_block[job.group], first)


def share_out(saves: Sequence[Save], groups: Sequence[Group], num_own: int, num_all: int) -> None:
    """Set which share of a step's time each save's blocks took.

    Only where the step is prefill of their request, and of hardly anything else: it computes `num_own` of
    `num_all` tokens for that request."""
    if num_own >= max(MIN_PREFILL_TOKENS, MIN_PREFILL_FRACTION * num_all):
        for save in saves:
            save.prefill_share = len(save.block_ids) * groups[save.group].block_tokens / num_all
