"""Trace: what was asked for and put, and when, in columns.

A request is a run of blocks of one chain. Most requests ask for a whole prompt; what a store did not have is
computed and put. Some recordings also know what was put without being asked for (decoded blocks), hence
the two counts per request:

    parent | block 0 ... num_asked-1 | ... num_filled-1 | ... last
             looked up, counts in the hit ratio
             put when missing ........................... | known to exist, not worth a put

Blocks are numbers here, because a number can only be compared; `names` makes the 32-byte prefix hashes that
the planner wants. A request per object was rejected: the policies' traces have millions of blocks.
"""

import hashlib
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ...tiers.block import Urgency

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]

NO_BLOCK = -1
#: Requests of the same instant are told apart by this much, in the order in which they stand in the file.
MIN_GAP_S = 1e-6
#: Thirty years: beyond it a float does not tell instants apart that are half of MIN_GAP_S from each other.
MAX_DURATION_S = 1e9


class TraceError(ValueError):
    """A trace that cannot be read; the message names the file, the line and the fix."""

    def __init__(self, path: object, line: int, message: str) -> None:
        super().__init__(f"{path}:{line}: {message}" if line else f"{path}: {message}")


class SessionHint(NamedTuple):
    """What a session said about itself when a request of it was over."""

    urgency: Urgency = Urgency.WAITING
    num_decoded_tokens: int = 0  # since the request; 0: it did not say
    back_in_s: float = float("inf")  # when it expects to need its blocks again; inf: it did not say
    is_end: bool = False


@dataclass(frozen=True, slots=True)
class TraceNamespace:
    """The shape of the blocks of one namespace, as far as the trace knows it."""

    block_tokens: int
    block_bytes: int = 0  # 0: the trace does not say


@dataclass(slots=True)
class Trace:
    """Requests in order of time; request r has blocks[first[r]:first[r + 1]] of one chain."""

    name: str
    namespaces: Sequence[TraceNamespace]
    at: F64  # seconds from the first request, strictly increasing
    first: I64  # num_requests + 1 offsets into `blocks`
    blocks: I32  # numbers from 0, in order of first appearance
    parent: I32  # the block before the first one; NO_BLOCK: it starts a chain
    num_asked: I32
    num_filled: I32
    num_tokens: I64  # of the asked part; its last block may be partial
    namespace: I32  # index into `namespaces`
    sessions: Sequence[str]  # empty: none
    num_blocks: int  # distinct ones
    #: By request: what its session says once it is over. A request of no blocks may be only that.
    hints: Mapping[int, SessionHint] = field(default_factory=dict)
    num_lost: int = 0  # accesses that the recorder was too slow for

    @property
    def num_requests(self) -> int:
        """Return the number of requests."""
        return len(self.at)

    @property
    def duration_s(self) -> float:
        """Return the seconds from the first to the last request."""
        return float(self.at[-1]) if len(self.at) else 0.0

    @property
    def num_accesses(self) -> int:
        """Return the number of blocks in all requests."""
        return len(self.blocks)

    def names(self) -> list[bytes]:
        """Return the prefix hash of every block: 32 bytes, the same in every replay."""
        return [
            hashlib.blake2b(number.to_bytes(8, "little"), digest_size=32).digest()
            for number in range(self.num_blocks)
        ]

    def block_tokens_of_requests(self) -> I64:
        """Return the tokens per block of each request's namespace."""
        sizes = np.array([namespace.block_tokens for namespace in self.namespaces], np.int64)
        return sizes[self.namespace]

    def tokens_of(self, num_blocks: I32) -> I64:
        """Return the prompt tokens in the first `num_blocks` blocks of each request."""
        tokens: I64 = np.minimum(num_blocks * self.block_tokens_of_requests(), self.num_tokens)
        return tokens

    def block_namespace(self) -> I32:
        """Return the namespace of every block."""
        found = np.zeros(self.num_blocks, np.int32)
        found[self.blocks] = np.repeat(self.namespace, np.diff(self.first))
        return found

    def stretch(self, start: int, stop: int) -> "Trace":
        """Return requests `start` to `stop` as a trace of their own."""
        if not 0 <= start < stop <= self.num_requests:
            raise ValueError(f"requests {start} to {stop} of {self.num_requests}")
        return self.only(range(start, stop), f"{self.name}[{start}:{stop}]")

    def only(self, requests: Iterable[int], name: str) -> "Trace":
        """Return these requests as a trace of their own; their times begin at 0."""
        builder = TraceBuilder(name, name)
        for namespace in self.namespaces:
            builder.add_namespace(namespace)
        for r in requests:
            parent = int(self.parent[r])
            builder.add(
                float(self.at[r]),
                self.blocks[self.first[r] : self.first[r + 1]].tolist(),
                num_tokens=int(self.num_tokens[r]),
                num_asked=int(self.num_asked[r]),
                num_filled=int(self.num_filled[r]),
                parent=None if parent == NO_BLOCK else parent,
                session=self.sessions[r],
                namespace=int(self.namespace[r]),
                hint=self.hints.get(r),
            )
        return builder.build()


class TraceBuilder:
    """Collects requests in any order of time; `build` sorts, checks and packs them."""

    def __init__(self, name: str, path: object = "", chain_fix: str = "") -> None:
        """`chain_fix`: what to do, in words, where a block has two predecessors."""
        self._name = name
        self._path = path or name
        self._chain_fix = chain_fix
        self.num_lost = 0
        self._namespaces: list[TraceNamespace] = []
        # A block seen for the first time gets the next number.
        self._numbers: defaultdict[Hashable, int] = defaultdict()
        self._numbers.default_factory = self._numbers.__len__
        self._chains: list[list[int]] = []
        self._rows: list[tuple[float, int, int, int, int, int, str, int, SessionHint | None]] = []

    def add_namespace(self, namespace: TraceNamespace) -> int:
        """Make a namespace known; return its index."""
        self._namespaces.append(namespace)
        return len(self._namespaces) - 1

    def add(
        self,
        at_s: float,
        chain: Sequence[Hashable],
        *,
        num_tokens: int,
        num_asked: int,
        num_filled: int,
        parent: Hashable | None = None,
        session: str = "",
        namespace: int = 0,
        hint: SessionHint | None = None,
        line: int = 0,
    ) -> None:
        """Add one request; blocks are named by anything hashable."""
        number_of = self._numbers.__getitem__
        first = NO_BLOCK if parent is None else number_of(parent)
        self._chains.append(list(map(number_of, chain)))
        row = (at_s, num_tokens, num_asked, num_filled, first, namespace, session, line, hint)
        self._rows.append(row)

    def build(self) -> Trace:
        """Return the trace.

        Raises TraceError when it is empty, a block has two predecessors, or it is too long.
        """
        if not self._rows:
            raise TraceError(self._path, 0, "no request in it")
        if not self._numbers:
            raise TraceError(self._path, 0, "no request in it names a block")
        order = sorted(range(len(self._rows)), key=lambda r: self._rows[r][0])
        rows = [self._rows[r] for r in order]
        at, num_tokens, num_asked, num_filled, parent, namespace, sessions, lines, hints = zip(
            *rows, strict=True
        )
        if at[-1] - at[0] > MAX_DURATION_S:
            message = "{:.3g} s after the first request, more than {:.3g}: are the times in another unit?"
            raise TraceError(self._path, lines[-1], message.format(at[-1] - at[0], MAX_DURATION_S))
        chains = [self._chains[r] for r in order]
        first = np.zeros(len(rows) + 1, np.int64)
        np.cumsum([len(chain) for chain in chains], out=first[1:])
        blocks = np.array([block for chain in chains for block in chain], np.int32)
        trace = Trace(
            self._name,
            tuple(self._namespaces),
            _spread(np.array(at, np.float64) - at[0]),
            first,
            blocks,
            np.array(parent, np.int32),
            np.array(num_asked, np.int32),
            np.array(num_filled, np.int32),
            np.array(num_tokens, np.int64),
            np.array(namespace, np.int32),
            sessions,
            len(self._numbers),
            {request: hint for request, hint in enumerate(hints) if hint is not None},
            self.num_lost,
        )
        self._check_chains(trace, lines)
        return trace

    def _check_chains(self, trace: Trace, lines: Sequence[int]) -> None:
        """Check that each block has one predecessor: its name stands for everything before it."""
        before = predecessors(trace)
        known = np.full(trace.num_blocks, -2, np.int32)
        known[trace.blocks[::-1]] = before[::-1]  # the first appearance is written last
        wrong = np.flatnonzero(known[trace.blocks] != before)
        if len(wrong):
            request = int(np.searchsorted(trace.first, wrong[0], "right")) - 1
            position = int(wrong[0] - trace.first[request])
            message = (
                f"block {position} of this request follows another block than where it stood before; "
                "ids name a block and everything before it"
            )
            fix = f"; {self._chain_fix}" if self._chain_fix else ""
            raise TraceError(self._path, lines[request], message + fix)


def predecessors(trace: Trace) -> I32:
    """Return the block before each access; NO_BLOCK at the start of a chain."""
    before = np.empty_like(trace.blocks)
    before[1:] = trace.blocks[:-1]
    starts = trace.first[:-1]
    is_empty = starts == trace.first[1:]
    before[starts[~is_empty]] = trace.parent[~is_empty]
    return before


def _spread(at: F64) -> F64:
    """Make sorted times strictly increasing: each is at least MIN_GAP_S after the one before."""
    steps = np.arange(len(at)) * MIN_GAP_S
    spread: F64 = np.maximum.accumulate(at - steps) + steps
    return spread
