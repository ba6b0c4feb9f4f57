"""A complete connector for an engine with a paged KV cache (docs/integrations/write-a-connector.md).

    SchedulerSide    beside the scheduler: how many tokens of a prompt need no prefill, pinned on every rank
    WorkerSide       in each rank: copies between its pages and the appliance

Nothing here raises: a daemon that is away, slow, full or new is a cache miss, counted in `guard.causes`.
tests/docs/test_connector.py runs it against FakeAppliance and a real daemon.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt

from kvtier.clients import (
    Client,
    Guard,
    Lease,
    Namespace,
    NamespaceIdentity,
    Pieces,
    PutOutcome,
    Urgency,
    prefix_hashes,
)

LEASE_S = 30.0  # more than a request waits between `match` and the end of its load
CALL_S = 0.5  # what a miss may cost at most
STORED = (PutOutcome.STORED, PutOutcome.DEDUPLICATED, PutOutcome.IN_PROGRESS)


@dataclass
class Request:
    """One prompt of a conversation."""

    tokens: Sequence[int]
    session: str
    hashes: list[bytes] = field(default_factory=list)  # of its full blocks, without the last token
    leases: list[Lease] = field(default_factory=list)  # one per rank


class SchedulerSide:
    """Matches prompts with what is stored. `ranks` are the identities of all ranks' KV."""

    def __init__(self, client: Client, ranks: Sequence[NamespaceIdentity]) -> None:
        self.guard = Guard("connector.scheduler")
        self._client = client
        self._ranks = ranks

    def match(self, request: Request) -> int:
        """Pin the stored prefix on every rank; return its length in tokens. Blocks on nvme come up."""
        geometry = self._ranks[0].geometry
        request.hashes = prefix_hashes(geometry, request.tokens[:-1])  # the last token is always computed
        for identity in self._ranks if request.hashes else ():
            lease = self.guard.ask("match", partial(self._acquire, identity, request))
            if lease is None:
                break
            request.leases.append(lease)
        is_on_all = len(request.leases) == len(self._ranks)
        num_blocks = min(lease.num_blocks for lease in request.leases) if is_on_all else 0
        return num_blocks * geometry.block_tokens

    def loaded(self, request: Request) -> None:
        """Release what `match` pinned: every rank has loaded, or will not."""
        for lease in request.leases:
            self.guard.give_back("release", lease.release)
        request.leases.clear()

    def finished(self, request: Request, back_in_s: float | None = None, *, is_last: bool = False) -> None:
        """Report the end of a request: of the conversation, or with its next turn in `back_in_s`."""
        self.loaded(request)
        urgency = Urgency.ENDED if is_last else Urgency.WAITING
        self.guard.ask("finished", lambda: self._client.session(request.session, urgency, None, back_in_s))

    def _acquire(self, identity: NamespaceIdentity, request: Request) -> Lease:
        namespace = self._client.register(identity)  # cheap, and right after a restart of the daemon
        return self._client.acquire(
            namespace, request.hashes, session=request.session, ttl_s=LEASE_S, deadline_s=CALL_S, views=False
        )


class WorkerSide:
    """One rank. `pages` is its paged cache: uint8, shape (layers, pages, bytes of a layer of a block)."""

    def __init__(self, client: Client, identity: NamespaceIdentity, pages: npt.NDArray[np.uint8]) -> None:
        self.guard = Guard("connector.worker")
        self.pages = pages
        self._client = client
        self._identity = identity

    def load(
        self, request: Request, table: Sequence[int], on_group: Callable[[int], None] = lambda group: None
    ) -> int:
        """Copy the first len(table) blocks of a prompt into pages `table`; return how many are right, counted
        from the first. `on_group(g)` is called when layer group `g` of all of them is there."""
        return self.guard.ask("load", partial(self._load, request, table, on_group)) or 0

    def save(self, request: Request, table: Sequence[int], first_block: int = 0) -> int:
        """Store blocks `first_block` up to len(table) from pages `table`; return how many blocks of the
        prompt are stored now, from the first on. The pages must not change before this returns."""
        report = self.guard.ask("save", partial(self._put, request, table, first_block))
        for number, outcome in enumerate(report or ()):
            if outcome not in STORED:
                return first_block + number
        return len(table) if report else first_block

    def _load(self, request: Request, table: Sequence[int], on_group: Callable[[int], None]) -> int:
        namespace = self._client.register(self._identity)
        num_missing = [len(table)] * namespace.num_groups
        step = namespace.geometry.layers_per_group or namespace.geometry.num_layers
        chain = request.hashes[: len(table)]
        with self._client.acquire(
            namespace, chain, session=request.session, urgency=Urgency.PREFILL, deadline_s=CALL_S
        ) as lease:
            for fragment in lease:  # first layers first
                block, group = fragment.block, fragment.group
                layers = np.frombuffer(fragment.view, np.uint8).reshape(-1, self.pages.shape[2])
                self.pages[group * step : group * step + len(layers), table[block]] = layers
                del layers  # it points into the appliance's memory
                num_missing[group] -= 1
                if not num_missing[group]:
                    on_group(group)
            return lease.num_blocks if lease.still_valid() else 0  # asked after the last copy

    def _put(self, request: Request, table: Sequence[int], first_block: int) -> list[PutOutcome]:
        namespace: Namespace = self._client.register(self._identity)
        layers = self.pages.ctypes.data + np.arange(len(self.pages)) * self.pages.strides[0]
        starts = layers + np.array(table[first_block:])[:, None] * self.pages.strides[1]
        return self._client.put(
            namespace,
            request.hashes[first_block : len(table)],
            Pieces(starts, self.pages.shape[2], owner=self.pages),
            parent=request.hashes[first_block - 1] if first_block else b"",
            session=request.session,
            deadline_s=CALL_S,
        ).outcomes
