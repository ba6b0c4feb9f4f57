"""Keeps the announcer up to date, on the agent's loop: looks up where blocks are, then follows the daemon.

watching begins   where every block is has to be looked up: changes before that were missed
blocks are added  they are looked up, MAX_BLOCKS at a time
an event          says where its blocks are now; it is later than the answer of a lookup under way
the stream ends   the daemon has gone, or ended it: nothing is announced until it begins again
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing

from ....v1.types import Tier, TierKind
from ...aio import AsyncClient
from ...errors import KvtierError
from ...links.watching import BlocksChanged, watch_blocks
from ...values.namespace import Namespace
from .announcer import CPU, NOWHERE, STORAGE, Announcer, Key

log = logging.getLogger(__name__)

MAX_BLOCKS = 512  # in one lookup
RETRY_S = 1.0
MEDIUM = {TierKind.DEVICE: CPU, TierKind.MEMORY: CPU, TierKind.SEGMENTS: STORAGE, None: NOWHERE}
Namespaces = list[list[Namespace]]  # by rank and KV cache group


class Announcing:
    """Runs `watch` and `look_up` as tasks of one loop; `queue` is called on it.

    `namespaces`: those registered so far, by what tells them apart; `register` adds to them."""

    def __init__(
        self,
        announcer: Announcer,
        client: AsyncClient,
        namespaces: dict[tuple[str, bytes], Namespaces],
        register: Callable[[str, bytes], Awaitable[Namespaces]],
    ) -> None:
        self._announcer = announcer
        self._client = client
        self._namespaces = namespaces
        self._register = register
        self._queued: deque[Key] = deque()
        self._has_queued = asyncio.Event()
        self._is_watching = False
        self._has_warned = False
        #: Where a namespace's blocks are noted: ranks that hold the same KV share one.
        self._places: dict[int, list[tuple[tuple[str, bytes], int, int]]] = {}
        self._changed: set[tuple[Key, int]] = set()  # by events since the lookup under way began

    def queue(self, keys: Sequence[Key]) -> None:
        """Look these blocks up, as soon as changes are watched."""
        if self._is_watching:
            self._queued.extend(keys)
            self._has_queued.set()

    async def watch(self) -> None:
        """Follow the daemon for ever."""
        while True:
            try:
                async with aclosing(watch_blocks(self._client.operations.settings)) as stream:
                    async for changed in stream:
                        if changed is None:
                            await self._begin()
                        else:
                            self._apply(changed)
            except KvtierError as problem:
                self._warn(problem)
            finally:
                self._is_watching = False
                self._queued.clear()
                self._announcer.forget_places()
            await asyncio.sleep(RETRY_S)

    async def look_up(self) -> None:
        """Look up what was queued, for ever."""
        while True:
            await self._has_queued.wait()
            self._has_queued.clear()
            while self._queued:
                keys = self._next_run()
                try:
                    await self._look_up(keys)
                except KvtierError:
                    self._queued.extendleft(reversed(keys))
                    await asyncio.sleep(RETRY_S)

    def _warn(self, problem: KvtierError) -> None:
        if not self._has_warned:
            self._has_warned = True
            log.warning("kvtier: the engine's listeners are told of no blocks: %s", problem)

    async def _begin(self) -> None:
        """Number the namespaces as the daemon has them now, and look every block up."""
        self._places.clear()
        for key, ranks in list(self._namespaces.items()):
            for rank in ranks:
                for (
                    namespace
                ) in rank:  # a lookup registers it anew where the daemon does not know it any more
                    await self._client.lookup(namespace, [bytes(32)])
            self._number(key, ranks)
        self._is_watching, self._has_warned = True, False
        self.queue(self._announcer.forget_places())

    def _number(self, key: tuple[str, bytes], ranks: Namespaces) -> None:
        for i, rank in enumerate(ranks):
            for group, namespace in enumerate(rank):
                noted = self._places.setdefault(namespace.id, [])
                if (key, i, group) not in noted:
                    noted.append((key, i, group))

    def _apply(self, changed: BlocksChanged) -> None:
        for namespace, rank, group in self._places.get(changed.namespace_id, ()):
            for name, kind in zip(changed.names, changed.kinds, strict=True):
                key = Key(namespace, group, name)
                self._changed.add((key, rank))
                self._announcer.place(key, rank, MEDIUM[kind])

    def _next_run(self) -> list[Key]:
        """Take the next keys of one namespace and group from the queue."""
        keys = [self._queued.popleft()]
        while self._queued and len(keys) < MAX_BLOCKS and self._queued[0][:2] == keys[0][:2]:
            keys.append(self._queued.popleft())
        return keys

    async def _look_up(self, keys: Sequence[Key]) -> None:
        namespace, group, _ = keys[0]
        ranks = await self._register(*namespace)
        self._number(namespace, ranks)
        self._changed.clear()
        kinds = dict((await self._client.info).ladder)
        for i, rank in enumerate(ranks):
            first = 0
            while first < len(keys):
                names = [key.name for key in keys[first:]]
                found = await self._client.lookup(rank[group], names)
                if not self._is_watching:
                    return  # every block will be looked up again
                tiers: list[Tier | None] = [*found.tiers, None]  # the block behind these is not stored
                for key, tier in zip(keys[first:], tiers, strict=False):
                    if (key, i) not in self._changed:
                        self._announcer.place(key, i, MEDIUM[kinds[tier] if tier is not None else None])
                first += found.num_blocks + 1
