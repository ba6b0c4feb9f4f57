"""Mover: executes copies at their own time, and badly when told to.

A copy is queued, begins, moves its bytes, ends, and is heard of, each later than the one before. Tokens
are read from the source and written to the target when the bytes move, whatever stands there by then.
Readers are registered when the copy is *queued*: from then on nobody may reuse its source.
"""

from typing import TYPE_CHECKING

from kvtier.appliance.core.events import CopyFinished
from kvtier.appliance.core.instructions import CancelCopy, Copy, HastenCopy
from kvtier.tiers.base import Cause, CopyItem, CopyOutcome
from kvtier.tiers.block import Tier
from kvtier.tiers.codecs.base import PROFILED_ID
from kvtier.v1.shm import extent_of

from .ladder import HBM, NVME
from .oracle import checksum_of

if TYPE_CHECKING:
    from .daemon import Daemon


class Staging:
    """A client's staging extent: tokens by byte offset."""

    def __init__(self) -> None:
        self.tokens: dict[int, int] = {}
        self.is_open = True


class _Job:
    """One copy on its way."""

    __slots__ = ("copy", "generations", "has_begun", "is_over", "staging", "tokens")

    def __init__(self, copy: Copy, staging: Staging | None) -> None:
        self.copy = copy
        self.staging = staging
        self.has_begun = False
        self.is_over = False
        self.tokens: list[int | Cause] = []  # read at the beginning, or why not
        self.generations: list[int] = []


class Mover:
    """Executes the copies of one daemon."""

    def __init__(self, daemon: "Daemon") -> None:
        self._daemon = daemon
        self._world = daemon.world
        self._jobs: dict[int, _Job] = {}

    def in_flight(self) -> list[Copy]:
        """Return the copies that nobody has heard the end of."""
        return [job.copy for job in self._jobs.values()]

    def start(self, copy: Copy) -> None:
        """Queue a copy."""
        world, config = self._world, self._daemon.config
        world.note(">Copy", copy.copy, copy.source, copy.target, [(i.source, i.target) for i in copy.items])
        job = _Job(copy, self._daemon.stagings.get(copy.client) if copy.source is None else None)
        self._jobs[copy.copy] = job
        for item in copy.items:
            self._register(copy.source, item.source, +1)
            if job.staging is not None:
                self._daemon.contents.bring_anew(job.staging.tokens.get(item.source, 0))
        if (copy.source, copy.target) == (NVME, HBM):
            world.counts["straight_loads"] += len(copy.items)
        is_cold = NVME in (copy.source, copy.target)
        mean_s = config.nvme_copy_s if is_cold else config.memory_copy_s
        queued_s, moving_s = world.spread(mean_s), world.spread(mean_s)
        if self._fault("latency_spike"):
            moving_s *= 50
        if is_cold and self._fault("hang"):
            moving_s += 3 + 10 * world.random()
        world.after(queued_s, self._begin, job)
        world.after(queued_s + moving_s, self._end, job)

    def cancel(self, instruction: CancelCopy) -> None:
        """Drop a copy that has not begun; one that has completes."""
        job = self._jobs.get(instruction.copy)
        if job is not None and not job.has_begun:
            job.has_begun = True
            job.tokens = [Cause.CANCELLED] * len(job.copy.items)

    def hasten(self, instruction: HastenCopy) -> None:
        """Let a copy that has not begun begin at once."""
        job = self._jobs.get(instruction.copy)
        if job is not None:
            job.copy.urgency = instruction.urgency
            if not job.has_begun:
                self._world.after(0.0, self._begin, job)

    def die(self) -> None:
        """The process is gone; what was being written to the cold store is there, or not, or half."""
        daemon, world = self._daemon, self._world
        for job in self._jobs.values():
            if job.copy.target is NVME and job.has_begun and not job.is_over:
                for item, token in zip(job.copy.items, job.tokens, strict=True):
                    if isinstance(token, Cause) or world.random() < 0.3:
                        continue
                    whole = world.random() < 0.5
                    if self._daemon.cold.segments[extent_of(item.target)].is_sealed:
                        continue
                    daemon.cold.write(
                        item.target,
                        item.label,
                        token,
                        as_stored=job.copy.source is NVME,
                        is_torn=not whole,
                    )

    # ------------------------------------------------------------------------------------ private

    def _begin(self, job: _Job) -> None:
        """The bytes start to move: the source is looked at, the target is not what it was."""
        if not self._daemon.is_alive or job.has_begun:
            return
        job.has_begun = True
        copy = job.copy
        target = self._daemon.memories.get(copy.target)
        for item in copy.items:
            token = self._read(job, item)
            job.tokens.append(token)
            if target is not None and not isinstance(token, Cause):
                target.begin_write(item.target)

    def _end(self, job: _Job) -> None:
        """The last byte was moved. What the source held at the beginning or holds now is what arrived."""
        if not self._daemon.is_alive:
            return
        job.is_over = True
        outcomes = [self._end_one(job, n, item) for n, item in enumerate(job.copy.items)]
        late_s = (
            self._world.spread(5 * self._daemon.config.nvme_copy_s) if self._fault("late_completion") else 0
        )
        self._world.after(late_s, self._deliver, job, outcomes)

    def _end_one(self, job: _Job, number: int, item: CopyItem) -> CopyOutcome:
        copy, daemon = job.copy, self._daemon
        token = job.tokens[number]
        if not isinstance(token, Cause) and self._world.random() < 0.5:
            again = self._read(job, item, is_end=True)
            token = token if isinstance(again, Cause) else again
        memory = daemon.memories.get(copy.target)
        if isinstance(token, Cause):
            if memory is not None and not isinstance(job.tokens[number], Cause):
                memory.end_write(item.target, daemon.contents.garbage())
            return CopyOutcome(token)
        failed = self._fault("dma_error") and NVME not in (copy.source, copy.target)
        if memory is not None:
            memory.end_write(item.target, daemon.contents.garbage() if failed else token)
        cause: Cause | None = Cause.IO_ERROR if failed else None
        if copy.target is NVME:
            as_stored = copy.source is NVME
            cause = daemon.cold.write(item.target, item.label, token, as_stored=as_stored)
            if as_stored and cause is not None:
                cause = Cause.NO_SPACE  # what forward.py says: the record is still where it was
        elif cause is not None and copy.source is NVME:
            daemon.oracle.is_lossy = True
        is_decoded = copy.source is NVME and item.label.codec_id == PROFILED_ID
        digest = checksum_of(token) if is_decoded else item.label.checksum or checksum_of(token)
        return CopyOutcome(cause, b"" if cause else digest)

    def _read(self, job: _Job, item: CopyItem, is_end: bool = False) -> int | Cause:
        """Return what the source holds now."""
        copy, daemon = job.copy, self._daemon
        if copy.source is None:
            if job.staging is None or (not is_end and not job.staging.is_open):
                return Cause.SOURCE_GONE
            return job.staging.tokens.get(item.source, 0)
        if copy.source is NVME:
            cause, token = daemon.cold.read(item.source, item.label, daemon.config.verify)
            if cause is not None:
                daemon.oracle.is_lossy = True
            return token if cause is None else cause
        memory = daemon.memories[copy.source]
        if not memory.matches(item.source, item.label):
            if memory.slot(item.source).token in daemon.contents.doomed:
                return Cause.WRONG_IDENTITY  # its tenant was erased; what the engine says then
            if daemon.config.verify:
                raise _mismatch(memory.tier, item.source)
            return memory.slot(item.source).token
        return memory.slot(item.source).token

    def _deliver(self, job: _Job, outcomes: list[CopyOutcome]) -> None:
        if not self._daemon.is_alive:
            return
        for item in job.copy.items:
            self._register(job.copy.source, item.source, -1)
        del self._jobs[job.copy.copy]
        if job.copy.source is job.copy.target and job.copy.target is not NVME:
            self._world.counts["moved_inside"] += sum(outcome.cause is None for outcome in outcomes)
        self._daemon.step(CopyFinished(job.copy.copy, outcomes))

    def _register(self, source: Tier | None, place: int, by: int) -> None:
        if source is NVME:
            self._daemon.cold.segments[extent_of(place)].num_readers += by
        elif source is not None:
            self._daemon.memories[source].slot(place).num_readers += by

    def _fault(self, name: str) -> bool:
        if self._world.chance(self._daemon.config.rates[name]):
            self._world.counts[name] += 1
            return True
        return False


def _mismatch(tier: Tier, place: int) -> Exception:
    from .world import Violation

    return Violation("unexplained mismatch", f"{tier.label} slot {place:#x} is not what a queued copy reads")
