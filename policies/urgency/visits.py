"""Visits and kinds: features of a request that predict the next use of its blocks.

A *visit* is one request on one chain: a turn of a conversation, a step of an agent, one question about a
shared document. A request that goes on where an earlier one ended is the next turn of the same conversation,
whether or not it names a session; so turns, gaps and growth are known without session ids. (The last
block of a prompt may be partial and is then another block in the next turn; hence "or one block before".)
All other requests that begin with stored blocks *fork* the chain: the blocks before the fork are shared.

What a fork uses again is a matter of how many came before, not of one conversation. Hence the kinds of
blocks below, each with a base hazard of its own, and features of the conversation only where it matters.
"""

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from ...tiers.block import Urgency
from .ages import NUM_BINS, bin_of

NEW, TAIL, PRIVATE = 0, 1, 2
#: Forks up to which a block is of the kinds after PRIVATE.
SHARED_UP_TO = (1, 3, 7, 15, math.inf)
NUM_KINDS = PRIVATE + 1 + len(SHARED_UP_TO)
#: From this kind on a block belongs to no conversation: features of the last one do not apply to it.
PUBLIC = PRIVATE + 3
#: Weight of the last gap in the running mean of logarithms of gaps.
GAP_WEIGHT = 0.4
MAX_LOG = 9
NUM_LOGS = MAX_LOG + 1
MAX_FINE_LOG = 20
MAX_USES_LOG = 38
USES_PER_DOUBLING = 3
MAX_TURN = 10
#: Beginnings of conversations that go on, are new, or fork.
FIRST, NEXT, FORK = 0, 1, 4
NUM_STAGES = 5
UNSAID = 0

SIZES = (
    1 + MAX_TURN + 2,  # turn, 1 for a fork
    1 + NUM_STAGES * NUM_LOGS,  # stage x new blocks
    1 + NUM_STAGES * NUM_LOGS,  # stage x blocks
    1 + MAX_FINE_LOG + 1,  # new blocks, finer
    1 + MAX_FINE_LOG + 1,  # blocks, finer
    1 + NUM_STAGES * NUM_KINDS,  # stage x kind
    1 + MAX_USES_LOG + 1,  # uses, finer still
    1 + NUM_BINS,  # age at the last use
    3,  # what the session said: waiting, idle
    1 + NUM_STAGES * NUM_LOGS,  # stage x decoded tokens
    1 + MAX_FINE_LOG + 1,  # decoded tokens, finer
)
_STARTS = tuple(sum(SIZES[:number]) for number in range(len(SIZES)))
NUM_FEATURES = len(SIZES)
_SAID: dict[int, int] = {Urgency.WAITING: 1, Urgency.IDLE: 2}
#: Gaps that an age is compared with: the last one, their mean, the mean of all since the blocks came, and the
#: time that decoding the answer takes.
NUM_GAPS = 4
#: Features with values on a line, and where they lie: logarithms of uses, up to a limit, because what all
#: requests use would tilt the line for the others.
LINES = {6: tuple(min(3.0, max(0, value - 1) / USES_PER_DOUBLING) for value in range(SIZES[6]))}
#: The gap of which the same holds.
GAPS_ON_LINE = (2,)
#: Seconds a decoded token takes. Its value does not matter: it shifts what is learned by some bins.
DECODE_S = 0.03


@dataclass(eq=False, slots=True)
class Visit:
    """One request on one chain. Mutable: a prompt is put in several calls, and decoding goes on."""

    used_at: float
    session: int  # 0: not named
    tip: int  # row of its last stored block
    num_blocks: int  # of its whole chain, stored or not
    num_known: int  # blocks at its beginning that were known before
    turn: int = 0  # 0: the first one
    last_gap_s: float = 0.0
    mean_log_gap: float = 0.0
    stretches: list[int] = field(default_factory=list)
    num_decoded_tokens: int = 0  # of its answer, as far as its session said so
    silence: int = UNSAID  # urgency its session stated after it, if waiting or idle
    is_over: bool = False  # its session ended
    said_at: float = 0.0
    back_at: float = math.inf  # announced; inf: not
    num_named: int = 0  # blocks at its beginning with known names
    head: bytes = b""  # name of its first block, where nothing of its chain was stored

    @property
    def state(self) -> int:
        """A hash of what describes its blocks, beside their own pasts."""
        gaps, said = (self.last_gap_s, self.mean_log_gap), (self.silence, self.num_decoded_tokens)
        return hash((self.turn, self.num_blocks, self.num_known, gaps, said))

    @property
    def num_new(self) -> int:
        """Number of blocks that were not requested before."""
        return max(0, self.num_blocks - self.num_known)

    def continues(self, earlier: "Visit", num_known: int) -> bool:
        """Whether this is the next turn of `earlier`: it begins with all of it, but for a partial block."""
        return num_known > 1 and num_known >= earlier.num_blocks - 1

    def follow(self, earlier: "Visit") -> None:
        """Set turn and gaps from the turn before."""
        gap_s = max(self.used_at - earlier.used_at, 0.01)
        log_gap = math.log2(gap_s)
        self.turn = earlier.turn + 1
        self.last_gap_s = gap_s
        mean = earlier.mean_log_gap
        self.mean_log_gap = mean + GAP_WEIGHT * (log_gap - mean) if earlier.turn else log_gap

    @property
    def stage(self) -> int:
        """FIRST, FORK, or NEXT and up for the next turns."""
        if self.turn:
            return min(NEXT + self.turn - 1, FORK - 1)
        return FORK if self.num_known > 1 else FIRST

    def kind_of(self, past: "Past") -> int:
        """Return the kind of blocks that this visit uses again: a fork is one more."""
        return kind_of(past.num_forks + (0 if self.turn else 1))


class Past(NamedTuple):
    """History of blocks before a visit uses them."""

    num_forks: int  # before this visit
    num_uses: int
    age_s: float  # since the use before; negative: they are new
    known_s: float  # since the first use; 0: they are new, or it is not known


#: Of blocks that were not requested before.
NO_PAST = Past(0, 0, -1.0, 0.0)


def kind_of(num_forks: int) -> int:
    """Return the kind of blocks that were used before, by the forks that went through them."""
    kind = PRIVATE
    if num_forks:
        kind += 1
        while num_forks > SHARED_UP_TO[kind - PRIVATE - 1]:
            kind += 1
    return kind


def features_of(visit: Visit, kind: int, num_uses: int, age_s: float) -> tuple[int, ...]:
    """Return the feature values of blocks that a visit used.

    `age_s`: seconds since the use before; negative: they are new.
    """
    stage, num_new = visit.stage, visit.num_new
    values = [0] * NUM_FEATURES
    if kind < PUBLIC:
        values[0] = 2 + min(visit.turn - 1, MAX_TURN) if visit.turn else 1 if stage == FORK else 0
        values[1] = 1 + stage * NUM_LOGS + _log(num_new, 1, MAX_LOG)
        values[2] = 1 + stage * NUM_LOGS + _log(visit.num_blocks, 1, MAX_LOG)
        values[3] = 1 + _log(num_new, 2, MAX_FINE_LOG)
        values[4] = 1 + _log(visit.num_blocks, 2, MAX_FINE_LOG)
        values[8] = _SAID.get(visit.silence, 0)
        if visit.num_decoded_tokens:
            sixteens = visit.num_decoded_tokens // 16
            values[9] = 1 + stage * NUM_LOGS + _log(sixteens, 1, MAX_LOG)
            values[10] = 1 + _log(sixteens, 2, MAX_FINE_LOG)
    values[5] = 1 + stage * NUM_KINDS + kind
    values[6] = 1 + _log(num_uses, USES_PER_DOUBLING, MAX_USES_LOG)
    values[7] = 1 + bin_of(age_s) if age_s >= 0 else 0
    return tuple([start + value if value else 0 for start, value in zip(_STARTS, values, strict=True)])


def gap_bins_of(visit: Visit, kind: int, num_uses: int, known_s: float) -> tuple[int, ...]:
    """Return, for each gap that an age is compared with, 1 + its bin, or 0.

    `num_uses`: of the blocks since they came; `known_s`: seconds from then to the last one, 0: none.
    """
    last = mean = own = answer = 0
    if kind < PUBLIC and visit.turn:
        last, mean = 1 + bin_of(visit.last_gap_s), 1 + bin_of(2.0**visit.mean_log_gap)
    if kind >= PRIVATE and known_s > 0:
        own = 1 + bin_of(known_s / num_uses)
    if kind < PUBLIC and visit.num_decoded_tokens:
        answer = 1 + bin_of(visit.num_decoded_tokens * DECODE_S)
    return last, mean, own, answer


def _log(number: int, steps_per_doubling: int, highest: int) -> int:
    """Return 0 for 0, else 1 + the logarithm of a count, cut off at `highest`."""
    if number < 1:
        return 0
    if steps_per_doubling == 1:
        return min(highest, number.bit_length())
    return min(highest, 1 + int(steps_per_doubling * math.log2(number)))
