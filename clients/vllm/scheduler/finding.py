"""Find how much of a prompt is stored on all ranks and in all groups, and pin it. No thread, no clock.

    one group     pin the chain; what is pinned and comes up is the hit
    several       look up first: which blocks of a window are needed depends on how far the others reach
    recurrent     the last state that is stored no further than that: all groups are found there or nowhere
    checkpoints   the same for windows that are kept here and there: the last place where one is whole

What an object store would bring sooner than computing counts as found: an acquire fetches it, and it comes up
like what is on nvme. A chain longer than one call names is fetched as far as its first call goes.

A hit is what every rank and every group has. Only what a continuation can see is pinned and brought up: for
a sliding window its last blocks, and nothing that the engine still has itself.
"""

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ....v1.types import Tier, Urgency
from ...aio import AsyncClient, AsyncLease
from ...connector.searching import SearchWait
from ...values.namespace import Namespace
from ..groups import Group, alignment_of
from .lookups import LookupRequest

MAX_BLOCKS = 4096  # in one call, as the daemon allows by default
MAX_STATES = 512  # places that are asked for a recurrent state, the last ones first
STATES_AT_ONCE = 16


@dataclass(slots=True)
class PinnedChain:
    """One chain of one namespace, pinned by as many leases as calls were needed."""

    parts: list[tuple[int, int, AsyncLease]] = field(default_factory=list)  # (first block, blocks, lease)

    @property
    def end(self) -> int:
        """End of the pinned prefix; of the readable one when all leases have been waited for."""
        end = 0
        for first, length, lease in self.parts:
            if not lease.num_blocks:
                break  # such a lease says nothing of what is before it
            end = first + lease.num_blocks
            if lease.num_blocks < length:
                break
        return end

    @property
    def num_stored(self) -> int:
        """Blocks stored from the start, as far as it was asked."""
        end = 0
        for first, length, lease in self.parts:
            if not lease.num_stored:
                break
            end = first + lease.num_stored
            if lease.num_stored < length:
                break
        return end


@dataclass(slots=True)
class FoundPrefix:
    """What is pinned. The leases must be released, whatever `num_tokens` says."""

    num_tokens: int = 0  # 0: nothing worth a load
    stored: tuple[int, ...] = ()  # blocks from the start, per group, on all ranks; empty: unknown
    chains: list[list[PinnedChain]] = field(default_factory=list)  # [rank][group]

    @property
    def leases(self) -> list[AsyncLease]:
        """All leases."""
        return [lease for rank in self.chains for chain in rank for _, _, lease in chain.parts]

    @property
    def is_complete(self) -> bool:
        """Whether nothing is on its way up any more."""
        return all(lease.is_complete for lease in self.leases)

    @property
    def is_crowded(self) -> bool:
        """Whether more is stored, and worth it, than could be pinned beside what this client holds already.
        Ask before `wait`."""
        return any(lease.num_stored > lease.num_blocks and not lease.reason for lease in self.leases)

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """Where the blocks of the first group were found, from the start of its chain as far as known."""
        if not self.chains:
            return ()
        parts = self.chains[0][0].parts
        return tuple(tier for _, _, lease in parts for tier in lease.tiers) if parts[0][0] == 0 else ()


class Finder:
    """Finds and pins with one client. `namespaces` arguments are [rank][group]."""

    def __init__(
        self, client: AsyncClient, groups: Sequence[Group], ttl_s: float, search_wait_s: float
    ) -> None:
        """`search_wait_s`: how long a lookup may wait for a search of the object store."""
        self._client = client
        self._search_wait_s = search_wait_s
        self._groups = list(groups)
        self._alignment = alignment_of(groups)
        self._recurrent = [group for group in groups if group.is_recurrent]
        self._sparse = [group for group in groups if group.checkpoint_tokens]
        self._needs_all = any(group.window_tokens or group.is_recurrent for group in groups)
        self._ttl_s = ttl_s

    async def pin(
        self, namespaces: list[list[Namespace]], question: LookupRequest, found: FoundPrefix
    ) -> None:
        """First half: pin. Blocks may still be on their way up.

        Fills `found` step by step, so that no lease is lost when this fails or is cancelled. Raises
        KvtierError."""
        chains = [group.chain(question.hashes) for group in self._groups]
        if len(self._groups) > 1 or self._needs_all:
            if question.source is not None:  # waited for, and not stored before it has come
                reach = tuple(group.num_blocks(question.source.num_tokens) for group in self._groups)
            else:
                reach = found.stored = await self._look_up(namespaces, chains)
            num_tokens = min(self._common_of_chains(reach, question), question.max_tokens)
            if self._recurrent or self._sparse:
                num_tokens = await self._last_place(namespaces, question, num_tokens)
            if num_tokens <= question.first_token:
                return
            chains = [
                chain[: group.num_blocks(num_tokens)]
                for group, chain in zip(self._groups, chains, strict=True)
            ]
        num_named = self._common([len(chain) for chain in chains])
        firsts = [
            len(chain) - 1
            if group.is_recurrent
            else max(group.num_blocks(question.first_token), group.first_needed(num_named))
            for group, chain in zip(self._groups, chains, strict=True)
        ]
        found.chains = [[PinnedChain() for _ in self._groups] for _ in namespaces]
        await _all(
            (self._pin_chain if group.is_chain else self._pin_end)(
                rank[g], chains[g], firsts[g], question, pinned[g]
            )
            for rank, pinned in zip(namespaces, found.chains, strict=True)
            for g, group in enumerate(self._groups)
        )
        self._conclude(found, question, num_named)

    async def wait(self, found: FoundPrefix, question: LookupRequest) -> None:
        """Second half: wait until all that is pinned is readable, or has failed to come up in time."""
        if found.num_tokens:
            expected = self._ends(found)
            await _all(lease.wait() for lease in found.leases)
            self._conclude(found, question, found.num_tokens)
            found.stored = tuple(  # what was to come and did not is not stored: it is saved when computed
                end if end < before else max(num_stored, end)
                for num_stored, end, before in zip(found.stored, self._ends(found), expected, strict=True)
            )

    def _ends(self, found: FoundPrefix) -> list[int]:
        """Return the end of each group's pinned prefix on all ranks."""
        return [min(rank[g].end for rank in found.chains) for g in range(len(self._groups))]

    def _conclude(self, found: FoundPrefix, question: LookupRequest, num_named: int) -> None:
        """Work out the hit from what the leases say now."""
        ends = self._ends(found)
        if not found.stored:  # nothing was looked up: what the leases hold
            found.stored = tuple(
                min(rank[g].num_stored for rank in found.chains) for g in range(len(self._groups))
            )
        num_tokens = min(self._common(ends), num_named)
        if self._needs_all and num_tokens < num_named:  # window or state before a shorter end were not pinned
            num_tokens = 0
        found.num_tokens = num_tokens if num_tokens > question.first_token else 0
        found.stored = tuple(
            number if group.is_chain else group.num_blocks(found.num_tokens)
            for number, group in zip(found.stored, self._groups, strict=True)
        )

    async def _look_up(self, namespaces: list[list[Namespace]], chains: list[list[bytes]]) -> tuple[int, ...]:
        """Return how many blocks of each chain all ranks have, or can have from the object store; of states
        and windows at checkpoints, which are no chain, 0."""
        found = await asyncio.gather(
            *(
                self._look_up_chain(rank[group.index], chains[group.index] if group.is_chain else [])
                for rank in namespaces
                for group in self._groups
            )
        )
        return tuple(min(found[g :: len(chains)]) for g in range(len(chains)))

    async def _look_up_chain(self, namespace: Namespace, chain: list[bytes]) -> int:
        for first in range(0, len(chain), MAX_BLOCKS):
            piece = chain[first : first + MAX_BLOCKS]
            found, wait = await self._client.lookup(namespace, piece), SearchWait(self._search_wait_s)
            while not first and (pause_s := wait.pause_s(found)):
                await asyncio.sleep(pause_s)
                found = await self._client.lookup(namespace, piece)
            num_found = found.num_blocks if first else found.num_available
            if num_found < len(piece):
                return first + num_found
        return len(chain)

    async def _last_state(
        self, namespaces: list[list[Namespace]], question: LookupRequest, num_tokens: int
    ) -> int:
        """Return the end of the longest prefix of which all ranks have the state; 0: none.

        At most `num_tokens`."""
        last = num_tokens // self._alignment * self._alignment
        ends = range(last, question.first_token, -self._alignment)[:MAX_STATES]
        for start in range(0, len(ends), STATES_AT_ONCE):
            asked = ends[start : start + STATES_AT_ONCE]
            are_stored = await asyncio.gather(*(self._has_state(namespaces, question, end) for end in asked))
            for end, is_stored in zip(asked, are_stored, strict=True):
                if is_stored:
                    return end
        return 0

    async def _has_state(
        self, namespaces: list[list[Namespace]], question: LookupRequest, num_tokens: int
    ) -> bool:
        found = await asyncio.gather(
            *(
                self._client.lookup(rank[group.index], [group.name_of(question.hashes, num_tokens)])
                for rank in namespaces
                for group in self._recurrent
            )
        )
        return all(one.num_blocks for one in found)

    async def _last_place(
        self, namespaces: list[list[Namespace]], question: LookupRequest, num_tokens: int
    ) -> int:
        """Return the end of the longest prefix of which all ranks have the state and the last windows, at
        most `num_tokens`; 0: none."""
        end = num_tokens // self._alignment * self._alignment
        for _ in range(MAX_STATES):
            if end <= question.first_token:
                break
            before = end
            if self._sparse:
                end = await self._last_window(namespaces, question, end)
            if self._recurrent and end > question.first_token:
                end = await self._last_state(namespaces, question, end)
            if end == before:
                return end
        return 0

    async def _last_window(self, namespaces: list[list[Namespace]], question: LookupRequest, end: int) -> int:
        """Return `end` if the windows before it are stored on all ranks, else an end before which they may
        be: no window there has the block that is missing."""

        async def look_up(namespace: Namespace, group: Group) -> int:
            first = max(group.num_blocks(question.first_token), group.first_needed(end))
            names = group.chain(question.hashes)[first : group.num_blocks(end)]
            found = await self._client.lookup(namespace, names) if names else None
            if found is None or found.num_blocks == len(names):
                return end
            return (first + found.num_blocks) * group.block_tokens

        ends = await asyncio.gather(
            *(look_up(rank[group.index], group) for rank in namespaces for group in self._sparse)
        )
        return min(ends) // self._alignment * self._alignment

    async def _pin_end(
        self,
        namespace: Namespace,
        chain: list[bytes],
        first_block: int,
        question: LookupRequest,
        pinned: PinnedChain,
    ) -> None:
        """Pin a chain from `first_block` on, whether or not what is before it is stored."""
        own = PinnedChain()
        await self._pin_chain(namespace, chain[first_block:], 0, question, own)
        pinned.parts += [(first_block + first, number, lease) for first, number, lease in own.parts]

    async def _pin_chain(
        self,
        namespace: Namespace,
        chain: list[bytes],
        first_block: int,
        question: LookupRequest,
        pinned: PinnedChain,
    ) -> None:
        source = question.source
        num_expected = source.num_tokens // namespace.geometry.block_tokens if source is not None else 0
        for first in range(first_block // MAX_BLOCKS * MAX_BLOCKS, len(chain), MAX_BLOCKS):
            piece = chain[first : first + MAX_BLOCKS]
            expected = None
            if source is not None and num_expected and not first:  # a host is told names from a chain's start
                expected = source.expected(min(num_expected, len(piece)), question.deadline_s)
            lease = await self._client.acquire(
                namespace,
                piece,
                session=question.session,
                urgency=Urgency.QUEUED,
                ttl_s=self._ttl_s,
                deadline_s=question.deadline_s or None,
                first_block=max(0, first_block - first),
                views=False,
                retention=question.retention,
                expected=expected,
            )
            pinned.parts.append((first, len(piece), lease))
            if lease.num_blocks < len(piece):
                return

    def _common_of_chains(self, num_blocks: Sequence[int], question: LookupRequest) -> int:
        """Return the tokens that so many blocks of each group that is a chain have in common."""
        whole = [len(group.chain(question.hashes)) for group in self._groups]
        return self._common(
            [
                number if group.is_chain else end
                for group, number, end in zip(self._groups, num_blocks, whole, strict=True)
            ]
        )

    def _common(self, num_blocks: Sequence[int]) -> int:
        """Return the tokens that so many blocks of each group have in common."""
        num_tokens = min(
            number * group.block_tokens for number, group in zip(num_blocks, self._groups, strict=True)
        )
        return num_tokens // self._alignment * self._alignment


async def _all(calls: Iterable[Coroutine[Any, Any, object]]) -> None:
    """Wait for every call, then raise what the first one that failed raised: what others were granted after
    that must be known, or it would never be released."""
    for outcome in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome
