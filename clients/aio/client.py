"""AsyncClient: every call, with its signature and documentation. driver.py performs them."""

import os
from collections.abc import Sequence
from functools import partial
from typing import Any

from ...v1.addresses import default_target
from ...v1.types import NamespaceIdentity, Tier, Urgency
from ..memory.staging import StagingBuffer
from ..operations import gets, leases, lookups, puts
from ..operations.base import ClientSettings
from ..operations.direct import Exporter, pages_registration
from ..operations.terms import PutTerms, ReadTerms
from ..options import DEFAULT_LIMITS, DEFAULT_RETRY, DEFAULT_TIMEOUT, Limits, Retry, Timeout
from ..values.keys import only_hash, pack
from ..values.namespace import Namespace
from ..values.types import (
    ExpectedBlocks,
    GetReport,
    Lookup,
    Prefetch,
    PrefillSpeed,
    PutReport,
    Rank,
    Retention,
    ServerInfo,
)
from .driver import THREAD_BYTES, AsyncDriver
from .handles import AsyncLease, AsyncPin, AsyncSession
from .pages import AsyncPages


class AsyncClient(AsyncDriver):
    """A connection to one kvtier daemon. Connects on first use, reconnects by itself, closes by `async with`.

    `target` is `unix:///path` (shared memory, the fast way) or `host:port` (gRPC). `shared_memory` forces
    the choice. Every call raises KvtierError (errors.py) and nothing else; a miss is an answer.
    """

    def __init__(
        self,
        target: str | None = None,
        *,
        name: str = "",
        domain: str = "",
        timeout: Timeout = DEFAULT_TIMEOUT,
        retry: Retry = DEFAULT_RETRY,
        limits: Limits = DEFAULT_LIMITS,
        shared_memory: bool | None = None,
    ) -> None:
        target = target or default_target(os.environ)
        self._set_up(ClientSettings(target, name, domain, timeout, retry, limits, shared_memory))

    @classmethod
    def from_env(cls) -> "AsyncClient":
        """Make a client from KVTIER_TARGET, KVTIER_NAME and KVTIER_DOMAIN."""
        settings = ClientSettings.from_env()
        return cls(settings.target, name=settings.name, domain=settings.domain)

    # ------------------------------------------------------------------------------------- calls

    @property
    async def info(self) -> ServerInfo:
        """Version of the daemon, and the transport to it."""
        return await self.run(self.operations.info)

    async def register(self, identity: NamespaceIdentity, prefill: PrefillSpeed | None = None) -> Namespace:
        """Make a namespace known. Raises PreconditionFailed when no tier can hold its geometry.

        `prefill` says how fast its prompts are computed here: then blocks are not loaded from a tier that is
        slower than that. Without it the daemon learns from `prefill_s` of puts.
        """
        return await self.run(partial(self.operations.register, identity, prefill))

    async def lookup(self, namespace: Namespace, hashes: Sequence[bytes] | bytes) -> Lookup:
        """Return how much of a chain is stored. No side effect, no promise.

        On the daemon's host this is read from shared memory, and most often costs no message.
        """
        link = self._link
        if link is not None and (found := lookups.look_up_here(link.attachment, namespace, pack(hashes))):
            return found
        return await self.run(partial(lookups.lookup, self.operations, namespace, hashes))

    async def rank(
        self,
        namespace: Namespace,
        hashes: Sequence[bytes] | bytes,
        queues: dict[str, float] | None = None,
    ) -> Rank:
        """Return which host of the fleet should get a prompt, the best one first. No side effect, no promise.

        `queues`: hosts to choose from, by address or machine name, and the seconds of prefill that run and
        wait at each; None: all hosts that the daemon knows, and itself, with nothing waiting. A daemon older
        than this call closes the connection.
        """
        return await self.run(partial(self.operations.rank, namespace, hashes, queues))

    async def put(
        self,
        namespace: Namespace,
        hashes: Sequence[bytes] | bytes,
        data: Any,
        *,
        parent: bytes = b"",
        session: str = "",
        deadline_s: float | None = None,
        prefill_s: float = 0.0,
        retention: Sequence[Retention] = (),
    ) -> PutReport:
        """Store the blocks of a chain; return when their bytes are readable.

        `data` is one contiguous buffer of len(hashes) * block_bytes (block after block, fragments in
        group order), a list of one buffer per block, or Pieces. `parent` is the prefix hash of the block
        before the first one. Blocks that cannot be stored are in the report, not errors. `prefill_s` is what
        computing them took, if known; `retention` says what is worth keeping more than the rest, or less.
        """
        terms = PutTerms(parent, session, deadline_s, prefill_s, retention)
        return await self.run(partial(puts.put, self.operations, namespace, hashes, data, terms))

    async def get(
        self,
        namespace: Namespace,
        hashes: Sequence[bytes] | bytes,
        into: Any = None,
        *,
        first_block: int = 0,
        session: str = "",
        urgency: Urgency = Urgency.QUEUED,
        deadline_s: float | None = None,
        load_anyway: bool = False,
        expected: ExpectedBlocks | None = None,
    ) -> GetReport:
        """Fetch the stored part of a chain from `first_block` on.

        `into` is one writable contiguous buffer, block `first_block` first, a list of one per block, or
        Pieces; None allocates. Blocks that are `expected` are waited for. Bytes behind the report's
        `num_bytes` are undefined.
        """
        link = self._link
        if link is not None and into is not None and not first_block and (name := only_hash(hashes)):
            report = gets.get_one(link.attachment, namespace, name, into, session, THREAD_BYTES)
            if report is not None:
                if link.attachment.touches.are_due(self.operations.settings.limits):
                    await self.flush()
                return report
        terms = ReadTerms(first_block, session, urgency, deadline_s, load_anyway, expected=expected)
        return await self.run(partial(gets.get, self.operations, namespace, hashes, into, terms))

    async def acquire(
        self,
        namespace: Namespace,
        hashes: Sequence[bytes] | bytes,
        *,
        session: str = "",
        urgency: Urgency = Urgency.QUEUED,
        ttl_s: float | None = None,
        deadline_s: float | None = None,
        first_block: int = 0,
        views: bool = True,
        load_anyway: bool = False,
        retention: Sequence[Retention] = (),
        expected: ExpectedBlocks | None = None,
    ) -> AsyncLease:
        """Look up and pin in one step; read in place. Use it as a context manager.

        Without `views` the lease pins only, for a process that lets another one read: nothing is mapped
        here, and `wait` returns when everything is readable. Blocks on a tier that is known to be slower than
        computing them are left out, with the lease's `reason`, unless `load_anyway`. Blocks that are
        `expected` count as pinned until they come, or do not.
        """
        terms = ReadTerms(first_block, session, urgency, deadline_s, load_anyway, retention, expected)
        make = partial(leases.acquire, self.operations, namespace, hashes, ttl_s, views, terms)
        return AsyncLease(self, await self.run(make))

    async def pin(
        self,
        namespace: Namespace,
        hashes: Sequence[bytes] | bytes,
        ttl_s: float,
        floor: Tier | str = Tier.DRAM,
    ) -> AsyncPin:
        """Keep the stored prefix in `floor` or faster until the TTL passes or `unpin`.

        Tiers may be given by name, those of `info.ladder`.
        """
        pin_id, num_blocks = await self.run(
            partial(self.operations.pin, namespace, hashes, ttl_s, floor), repeat=False
        )
        return AsyncPin(self, pin_id, num_blocks)

    async def prefetch(
        self,
        namespace: Namespace | None,
        hashes: Sequence[bytes] | bytes,
        target: Tier | str = Tier.DRAM,
        deadline_s: float | None = None,
    ) -> Prefetch:
        """Promote the stored prefix before it is asked for. Returns at once.

        Without a namespace it is promoted in all of this client's isolation domain: what a router asks that
        knows a prompt's names, and not what engines run (`vllm.names.block_names`). Namespaces that have the
        first block then divide the 4,096 of a request, and `num_blocks` goes no further."""
        return await self.run(partial(self.operations.prefetch, namespace, hashes, target, deadline_s))

    async def session(
        self,
        session_id: str,
        urgency: Urgency = Urgency.QUEUED,
        deadline_s: float | None = None,
        back_in_s: float | None = None,
    ) -> AsyncSession:
        """Create or change a session; see AsyncSession.update."""
        session = AsyncSession(self, session_id)
        await session.update(urgency, deadline_s, back_in_s)
        return session

    async def staging(self, num_bytes: int) -> StagingBuffer:
        """Return memory from which a put copies nothing on this side. Raises Overloaded."""
        return await self.run(partial(puts.staging, num_bytes))

    async def register_pages(
        self,
        namespace: Namespace,
        preset: str,
        tensors: Sequence[Any],
        exporter: Exporter,
        *,
        page_tokens: int | None = None,
        num_events: int = 0,
        num_event_sets: int = 0,
    ) -> AsyncPages:
        """Open paged KV tensors on a device to the daemon, which then fills and reads them itself.

        `preset` says how they lie (page_layouts.PRESETS, or axes), `tensors` are in its order; they must stay
        alive and where they are. Gets and puts may name any namespace of this one's geometry. `num_events`
        are made for `after=`; `num_event_sets` gets at a time have an event per layer group. Raises
        InvalidRequest when the tensors do not fit, PreconditionFailed when the daemon cannot reach their
        device.
        """
        state = pages_registration(
            self.operations, namespace, preset, tensors, exporter, page_tokens, num_events, num_event_sets
        )
        await self.run(partial(state.register, namespace))
        return AsyncPages(self, state)

    async def flush(self) -> None:
        """Report blocks read one-sidedly now, instead of with the next call."""
        await self.run(self.operations.touch)

    async def close(self) -> None:
        """Give everything back. Idempotent; a later call connects anew."""
        await self._disconnect()

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(self, *problem: object) -> None:
        await self.close()
