"""Changes of blocks as they happen: EventsService.Watch, over gRPC also where the client's calls are not."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

import grpc

from ...v1 import kvcache_pb2 as pb
from ...v1.conversions import WireTiers
from ...v1.events_pb2 import WatchRequest, WatchResponse
from ...v1.events_pb2_grpc import EventsServiceStub
from ...v1.kvcache_pb2_grpc import KVCacheServiceStub
from ...v1.shm import HASH_BYTES
from ...v1.types import TierKind
from ..errors import CONNECTION_LOST, Unavailable, broken_answer
from ..operations.base import ClientSettings
from .remote import connect, connect_problem


@dataclass(frozen=True, slots=True)
class BlocksChanged:
    """Blocks of a namespace, and the kind of tier that each is read from now; None: it is not stored."""

    namespace_id: int
    names: list[bytes]
    kinds: list[TierKind | None]


async def watch_blocks(settings: ClientSettings) -> AsyncGenerator[BlocksChanged | None, None]:
    """Yield None, then what happens to the blocks that this caller may watch; nothing after None is missed.

    Ends by raising: Unavailable when the daemon has gone, another KvtierError when it refuses. A thread waits
    for the messages: grpc.aio has one queue for all loops of a process, and this process is the engine's.
    """
    channel = connect(settings)
    call: Any = None
    try:
        kinds, call = await asyncio.to_thread(_start, channel, settings)
        is_first = True
        while (message := await asyncio.to_thread(_next, call, settings)) is not None:
            yield None if is_first else _changed(message, kinds)
            is_first = False
    finally:
        if call is not None:
            call.cancel()
        channel.close()
    raise Unavailable("the daemon has ended the stream of block events", reason=CONNECTION_LOST)


def _start(channel: grpc.Channel, settings: ClientSettings) -> tuple[dict[int, TierKind | None], Any]:
    """Return the kinds of the daemon's tiers by their numbers on the wire, and the call."""
    try:
        timeout_s = settings.timeout.connect_s
        info = KVCacheServiceStub(channel).GetServerInfo(pb.GetServerInfoRequest(), timeout=timeout_s)
        ladder = WireTiers.announced(info.ladder)
        kinds = {int(ladder.number(tier)): kind for tier, kind in ladder.ladder}
        return kinds, EventsServiceStub(channel).Watch(WatchRequest())
    except grpc.RpcError as error:
        raise connect_problem(error, settings) from None


def _next(call: Any, settings: ClientSettings) -> WatchResponse | None:
    """Wait for the next message; None at the end."""
    try:
        message: WatchResponse | None = next(call, None)
        return message
    except grpc.RpcError as error:
        raise connect_problem(error, settings) from None


def _changed(message: WatchResponse, kinds: dict[int, TierKind | None]) -> BlocksChanged:
    packed, tiers = message.prefix_hashes, message.tiers
    if len(packed) != HASH_BYTES * len(tiers):
        raise broken_answer(f"a block event names {len(packed)} bytes of blocks and {len(tiers)} tiers")
    names = [packed[i : i + HASH_BYTES] for i in range(0, len(packed), HASH_BYTES)]
    return BlocksChanged(message.namespace_id, names, [kinds.get(number) for number in tiers])
