"""Chains of opaque blocks for runtimes that name blocks themselves: look up, store, load; a miss, never an
error.

What the plug-ins for vLLM's tiers and for SGLang have in common. Everything blocks with a deadline, goes
through a Guard, and answers with how far it came: a number of blocks from the start of what was asked.
Threads that want to overlap make a store each, because a Client serialises its calls.

    store   lookup (what is there need not travel) -> put the rest under its parent, or as a chain's start
    load    get; the first block that is gone ends it

What an object store holds of a chain is named from where the chain begins. `before` are the blocks of a chain
before those that are asked for; without them these are taken for its beginning.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ...v1.types import NamespaceIdentity, PutOutcome
from ..memory.buffers import Pieces
from ..operations.base import ClientSettings
from ..options import Limits, Timeout, plugin_connect_s
from ..sync import Client
from ..sync.handles import Lease
from ..values.namespace import Namespace
from ..values.types import PutReport
from .guard import Guard
from .plugin_options import ChainOptions
from .searching import lookup_after_search, whole_bundles

#: Held at one time, or a bundle of an object store: a client may pin only a share of the memory.
MAX_LOAD_BYTES = 32 << 20
LEAST_STAGING_BYTES = 2 << 20
MAX_GAPS = 16  # of one lookup; behind more of them nothing is found
GONE_BEFORE_LOAD = "GONE_BEFORE_LOAD"  # cause of a miss: found by a lookup, evicted before the get

Memory = Sequence[Any] | Pieces  # one buffer per block, or blocks in pieces


@dataclass(frozen=True, slots=True)
class Stored:
    """How a store ended: blocks from the start that are stored now, and how many had to travel."""

    num_blocks: int
    num_sent: int = 0


class ChainStore:
    """A way to the appliance that never raises an Exception. Threads take turns."""

    def __init__(self, client: Client, guard: Guard, deadline_s: float) -> None:
        self.guard = guard
        self._client = client
        self._deadline_s = deadline_s
        self._namespaces: dict[NamespaceIdentity, Namespace] = {}
        self._max_blocks = 0  # of one call, as the daemon said last
        self._turn = threading.RLock()

    @classmethod
    def at(
        cls, options: ChainOptions, guard: Guard, deadline_s: float, staging_bytes: int = 0
    ) -> "ChainStore":
        """Make a store with a connection of its own; nothing is sent yet."""
        settings = ClientSettings.from_env()
        client = Client(
            options.target or settings.target,
            name=options.name,
            domain=options.domain or settings.domain,
            timeout=Timeout(deadline_s, plugin_connect_s(deadline_s), grace_s=0.25),
            limits=Limits(staging_bytes=max(staging_bytes, LEAST_STAGING_BYTES)),
        )
        return cls(client, guard, deadline_s)

    def num_stored(self, identity: NamespaceIdentity, hashes: Sequence[bytes]) -> int | None:
        """Return how many of `hashes` are stored, from the first on; None when there was no answer."""

        def lookup(first: int, last: int) -> int | None:
            found = self.guard.ask(
                "lookup", lambda: self._client.lookup(self._namespace(identity), hashes[first:last])
            )
            return None if found is None else found.num_blocks

        with self._turn:
            return self._in_pieces(len(hashes), len(hashes), lookup)

    def num_available(
        self, identity: NamespaceIdentity, hashes: Sequence[bytes], before: Sequence[bytes] = ()
    ) -> int:
        """Return how many of `hashes` a load would bring, from the first on: from here or an object store."""

        def available(first: int, last: int) -> int | None:
            chain, start = self._from_beginning(before, hashes, first, last)
            wait_s = self._deadline_s / 2
            found = self.guard.ask(
                "lookup", lambda: lookup_after_search(self._client, self._namespace(identity), chain, wait_s)
            )
            return None if found is None else max(0, found.num_available - start)

        with self._turn:
            num_stored = (self.num_stored(identity, hashes) or 0) if before else 0
            if before and num_stored == len(hashes):
                return num_stored
            return max(num_stored, self._in_pieces(len(hashes), len(hashes), available) or 0)

    def which_stored(
        self, identity: NamespaceIdentity, hashes: Sequence[bytes], max_gaps: int = MAX_GAPS
    ) -> list[bool]:
        """Return for each of `hashes` whether it is stored.

        Behind `max_gaps` that are not, and from where there is no answer on, none is."""
        found: list[bool] = []
        while len(found) < len(hashes) and max_gaps:
            num_blocks = self.num_stored(identity, hashes[len(found) :])
            if num_blocks is None:
                break
            found += [True] * num_blocks + [False]
            max_gaps -= 1
        return (found + [False] * len(hashes))[: len(hashes)]

    def store(
        self,
        identity: NamespaceIdentity,
        hashes: Sequence[bytes],
        memory: Memory,
        *,
        parent: bytes = b"",
        session: str = "",
    ) -> Stored:
        """Store a chain that continues `parent`. What cannot be stored is counted with its cause."""
        with self._turn:
            return self._store(identity, hashes, memory, parent, session)

    def load(
        self,
        identity: NamespaceIdentity,
        hashes: Sequence[bytes],
        memory: Memory,
        *,
        before: Sequence[bytes] = (),
        session: str = "",
    ) -> int:
        """Load into `memory`; return how many blocks that gave, from the first on. The rest is undefined."""

        def get(first: int, last: int) -> int | None:
            chain, start = self._from_beginning(before, hashes, first, last)
            num_loaded = self._get(identity, chain, start, part(memory, first, last), session)
            if num_loaded is None:
                return None
            if before and num_loaded < last - first:  # what is before them may be stored here no more
                begun = first + num_loaded
                rest = self._get(identity, hashes[begun:last], 0, part(memory, begun, last), session)
                num_loaded += rest or 0
            self.guard.count(GONE_BEFORE_LOAD, last - first - num_loaded)
            return num_loaded

        geometry = identity.geometry
        step = whole_bundles(MAX_LOAD_BYTES // geometry.block_bytes, geometry)
        with self._turn:
            return self._in_pieces(len(hashes), step, get) or 0

    def pin(self, identity: NamespaceIdentity, hashes: Sequence[bytes]) -> list[Lease]:
        """Pin all of `hashes`; return the leases, one after another. None when one of them is not stored."""
        leases: list[Lease] = []

        def acquire(first: int, last: int) -> int | None:
            lease = self.guard.ask(
                "pin",
                lambda: self._client.acquire(
                    self._namespace(identity),
                    hashes[first:last],
                    load_anyway=True,
                    deadline_s=self._deadline_s,
                ),
            )
            leases.extend([lease] if lease else [])
            return lease.num_blocks if lease else None

        with self._turn:
            if self._in_pieces(len(hashes), len(hashes), acquire) == len(hashes):
                return leases
            self.give_back(leases)
            return []

    def give_back(self, leases: Sequence[Lease]) -> None:
        """End leases."""
        with self._turn:
            for lease in leases:
                self.guard.give_back("release", lease.release)

    def close(self) -> None:
        """Close the connection; it opens again when it is used."""
        self.guard.give_back("close", self._client.close)

    # ---------------------------------------------------------------------------------- internals

    def _get(
        self, identity: NamespaceIdentity, chain: Sequence[bytes], first: int, into: Any, session: str
    ) -> int | None:
        """Load the blocks of a chain from `first` on; return how many came, None without an answer."""
        report = self.guard.ask(
            "load",
            lambda: self._client.get(
                self._namespace(identity),
                chain,
                into,
                first_block=first,
                session=session,
                deadline_s=self._deadline_s,
            ),
        )
        return None if report is None else report.num_loaded

    def _store(
        self,
        identity: NamespaceIdentity,
        hashes: Sequence[bytes],
        memory: Memory,
        parent: bytes,
        session: str,
    ) -> Stored:
        num_known = self.num_stored(identity, hashes)
        if num_known is None or num_known == len(hashes):
            return Stored(num_known or 0)
        rest, data = hashes[num_known:], part(memory, num_known, len(hashes))
        parent = hashes[num_known - 1] if num_known else parent

        def put(under: bytes) -> PutReport | None:
            return self.guard.ask(
                "store",
                lambda: self._client.put(
                    self._namespace(identity),
                    rest,
                    data,
                    parent=under,
                    session=session,
                    deadline_s=self._deadline_s,
                ),
            )

        report = put(parent)
        if report and parent and report.outcomes[0] is PutOutcome.PARENT_MISSING:
            # What it continues is only in the runtime's own pools. It is worth as much as a chain's start.
            report = put(b"")
        if report is None:
            return Stored(num_known)
        for outcome in {outcome for outcome in report.outcomes if not outcome.is_kept}:
            self.guard.count(f"PUT_{outcome.name}", report.outcomes.count(outcome))
        return Stored(num_known + _num_leading_stored(report), report.num_stored)

    def _in_pieces(self, num_blocks: int, step: int, ask: Callable[[int, int], int | None]) -> int | None:
        """Ask about pieces that one call may name until one is not whole; return how many blocks that gave,
        None when the first got no answer."""
        limit = self.guard.ask("connect", lambda: self._client.info.max_blocks_per_request)
        if limit is None:
            return None
        self._max_blocks = limit
        step = max(1, min(step, limit))
        total = 0
        for first in range(0, num_blocks, step):
            last = min(first + step, num_blocks)
            number = ask(first, last)
            if number is None:
                return total or None
            total += number
            if number < last - first:
                break
        return total

    def _from_beginning(
        self, before: Sequence[bytes], hashes: Sequence[bytes], first: int, last: int
    ) -> tuple[Sequence[bytes], int]:
        """Return a chain that ends with `hashes[first:last]`, and where in it these begin.

        It is the whole chain unless that is too long for one call."""
        if len(before) + last > self._max_blocks:
            return hashes[first:last], 0
        return [*before, *hashes[:last]], len(before) + first

    def _namespace(self, identity: NamespaceIdentity) -> Namespace:
        known = self._namespaces.get(identity)
        if known is None:
            known = self._namespaces[identity] = self._client.register(identity)
        return known


def part(memory: Memory, first: int, last: int) -> Any:
    """Return the memory of blocks `first` up to `last`."""
    if isinstance(memory, Pieces):
        return Pieces(memory.addresses[first:last], memory.piece_bytes, memory.owner)
    return list(memory[first:last])


def _num_leading_stored(report: PutReport) -> int:
    refused = (number for number, outcome in enumerate(report.outcomes) if not outcome.is_kept)
    return next(refused, len(report.outcomes))
