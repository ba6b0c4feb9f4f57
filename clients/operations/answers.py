"""Answers of the daemon, checked before they are believed.

A wrong number in an answer, of a broken daemon or a hostile one, must not become a report of blocks that
never arrived, a copy to another address, or an exception that is no KvtierError. Each function returns what
an answer says, or raises `broken_answer`, whereupon the driver closes the connection.
"""

import math
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import numpy as np
import numpy.typing as npt

from ...v1 import kvcache_pb2
from ...v1.conversions import WireTiers
from ...v1.types import PutOutcome, Tier
from ..errors import broken_answer
from ..values.types import HostRank, Rank, ServerInfo

_HOST_FIELDS = [field.name for field in fields(HostRank) if field.name != "load"]
_OUTCOMES = {int(outcome): outcome for outcome in PutOutcome}


def server_info(message: Any, transport: str) -> ServerInfo:
    """Return what the daemon says of itself, in an AttachResponse or a GetServerInfoResponse."""
    if not message.max_blocks_per_request:
        raise broken_answer("a daemon that takes no blocks")
    ladder = announced(message).ladder
    return ServerInfo(message.version, message.epoch, transport, message.max_blocks_per_request, ladder)


def announced(message: Any) -> WireTiers:
    """Return the tiers that the daemon has, from an AttachResponse or a GetServerInfoResponse."""
    try:
        return WireTiers.announced(message.ladder)
    except ValueError:  # in one byte each, because they travel so
        raise broken_answer("a tier with a number above 255") from None


def num_blocks_of(message: Any, limit: int) -> int:
    """Return `num_blocks` of a message about a chain of `limit` blocks."""
    num_blocks: int = message.num_blocks
    if num_blocks > limit:
        raise broken_answer(f"{num_blocks} blocks of a chain of {limit}")
    return num_blocks


def tiers_of(packed: bytes, known: WireTiers) -> tuple[Tier, ...]:
    """Return the tiers in a `tiers` field of a daemon that has the tiers `known`."""
    try:
        return known.unpack(packed)
    except KeyError as problem:
        raise broken_answer(f"a tier numbered {problem}") from None


def rank_of(message: kvcache_pb2.RankResponse, num_blocks: int) -> Rank:
    """Return the ranking of a chain of `num_blocks` blocks."""
    for one in message.hosts:
        counts = one.num_held, one.num_in_memory + one.num_on_disk + one.num_in_unknown_tier
        if max(*counts, one.num_fetched + one.num_computed) > num_blocks:
            raise broken_answer(f"a host with more than {num_blocks} blocks of a chain that has as many")
        seconds = one.first_token_s, one.load_s, one.fetch_s, one.compute_s, one.queue_s
        if not all(0.0 <= value < math.inf for value in seconds):
            raise broken_answer("a host with times that are no seconds")
    hosts = tuple(
        HostRank(
            **{name: getattr(one, name) for name in _HOST_FIELDS},
            load={field.name: float(value) for field, value in one.load.ListFields()},
        )
        for one in message.hosts
    )
    speed = message.recompute_s, message.is_guess
    return Rank(hosts, num_blocks, message.block_tokens, *speed)


def outcomes_of(packed: bytes, num_blocks: int) -> list[PutOutcome]:
    """Return what became of the blocks of a put that names `num_blocks`."""
    if len(packed) != num_blocks:
        raise broken_answer(f"{len(packed)} outcomes of {num_blocks} blocks")
    try:
        # Not PutOutcome(number) for each: that took an eighth of what the client does for a put of 64 blocks.
        return [_OUTCOMES[number] for number in packed]
    except KeyError as problem:
        raise broken_answer(f"an outcome numbered {problem}") from None


class FragmentCounter:
    """Counts the bytes that a get, or a lease, still lacks of blocks `first_block` up to `num_blocks`.

    Only what has arrived as a whole counts, whatever number of blocks the daemon names.
    """

    def __init__(self, first_block: int, num_blocks: int, fragment_bytes: tuple[int, ...]) -> None:
        self._first_block = first_block
        self._lengths = fragment_bytes
        self._missing = np.empty((max(0, num_blocks - first_block), len(fragment_bytes)), np.int64)
        self._missing[:] = fragment_bytes
        self._num_answers_left = 2 * self._missing.size + 16  # the daemon needs one for each fragment at most

    def count_answer(self) -> None:
        """Count an answer of a stream that has no deadline of its own."""
        self._num_answers_left -= 1
        if self._num_answers_left < 0:
            raise broken_answer("answers without end")

    def rows_of(self, blocks: npt.NDArray[np.int64], groups: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the places of `blocks` behind the first one. `groups` has the same shape."""
        rows = blocks - self._first_block
        # Without its sign a row before the first one is beyond the last. A ufunc costs half of max().
        if len(rows) and np.maximum.reduce(rows.view(np.uint64)) >= len(self._missing):
            raise broken_answer("a block that was not asked for")
        if len(groups) and np.maximum.reduce(groups) >= len(self._lengths):
            raise broken_answer("a layer group that the namespace does not have")
        return rows

    def row_of(self, block: int, group: int) -> int:
        """Return the place of a block behind the first one."""
        row = block - self._first_block
        if not (0 <= row < len(self._missing) and group < len(self._lengths)):
            raise broken_answer(f"a chunk of fragment ({block}, {group}), which was not asked for")
        return row

    def parts(self, message: kvcache_pb2.GetResponse) -> Iterator[tuple[int, int, bytes]]:
        """Yield row, layer group and bytes of what a chunk has of each fragment. Each arrives in order."""
        more = zip(message.more_blocks, message.more_groups, strict=False)
        start, chunk = 0, message.chunk
        for block, group in ((message.block, message.group), *more):
            row = self.row_of(block, group)
            missing_bytes = int(self._missing[row, group])
            if not missing_bytes or message.offset != self._lengths[group] - missing_bytes:
                raise broken_answer(f"a chunk at {message.offset}, where {missing_bytes} bytes are missing")
            yield row, group, (part := chunk[start : start + missing_bytes])
            start += len(part)
        if start != len(chunk):
            raise broken_answer(f"a chunk of {len(chunk)} bytes, {start} of them of fragments")

    def add(self, row: int, group: int, num_bytes: int) -> bool:
        """Count bytes of a fragment; return whether that was the last of it."""
        self._missing[row, group] -= num_bytes
        return not self._missing[row, group]

    def add_all(
        self, rows: npt.NDArray[np.int64], groups: npt.NDArray[np.int64], right: npt.NDArray[np.bool_]
    ) -> None:
        """Count whole fragments, as far as they are `right`."""
        self._missing[rows[right], groups[right]] = 0

    def end(self, num_blocks: int) -> int:
        """Return the end of the prefix that has arrived, at most `num_blocks`."""
        num_whole = num_leading((self._missing == 0).all(axis=1))
        return min(self._first_block + num_whole, num_blocks)


def num_leading(is_there: npt.NDArray[np.bool_]) -> int:
    """Return how many are there from the first one on without a gap."""
    return len(is_there) if is_there.all() else int(is_there.argmin())
