"""KvEvents: block events for routers, on the wire as vLLM's ZmqEventPublisher puts them there.

    PUB     topic, sequence (8 bytes, big endian), payload = msgpack [time, [event, ...], 0]
    ROUTER  asked for a sequence: every batch remembered from there on, then sequence -1 and no payload

Source: `vllm/distributed/kv_events.py` of vLLM 0.32; tests compare byte by byte with what its classes encode.
So whatever listens to vLLM's events learns of kvtier's tiers without a line of its own: `medium` is GPU,
CPU or STORAGE for hbm, host memory and nvme. Prefix hashes are those of the runtime. What kvtier does not
know is sent as vLLM would for want of it: `token_ids` is empty, for kvtier never sees tokens. A router that
hashes tokens itself has to learn the hashes from the engine's own events.

Where to connect and where to bind is decided as vLLM does: wildcards and ipc are bound, the rest is
connected. Replays are served beside an endpoint that is bound: at the next port, or at the path with
`.replay` at its end.

gRPC's Watch (EventsService) says the same with gaps and reasons; this is for what speaks vLLM already. Sends
never block: a subscriber that is slow loses batches, sees the gap in the numbers, and asks for a replay.
"""

import asyncio
import itertools
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgpack
import zmq
import zmq.asyncio

from ...v1.types import TierKind
from ..config import is_private
from ..core.catalog.catalog import NO_ROW, Catalog
from ..core.events import Event
from ..core.instructions import BlockChange, Notify
from ..errors import StartError

log = logging.getLogger(__name__)

MEDIUM = {TierKind.DEVICE: "GPU", TierKind.MEMORY: "CPU", TierKind.SEGMENTS: "STORAGE"}
RANK = 0  # of the only publisher here
MAX_BATCHES = 10_000  # remembered for replays, as many as vLLM does by default
MAX_BATCH_BYTES = 64 << 20  # of those, all together
HIGH_WATER_MARK = 100_000
END = (-1).to_bytes(8, "big", signed=True)


class KvEvents:
    """Publishes from `start` to `stop`. Owned by the event loop."""

    def __init__(self, catalog: Catalog, endpoint: str, topic: str = "") -> None:
        self._catalog = catalog
        self._mediums = [MEDIUM[spec.kind] for spec in catalog.ladder.specs]
        self._endpoint = endpoint
        self._replay_endpoint = replay_endpoint_of(endpoint)
        self._topic = topic.encode()
        self._context = zmq.asyncio.Context()
        self._pub: Any = None
        self._replay: Any = None
        self._task: asyncio.Task[None] | None = None
        self._numbers = itertools.count()
        self._gathered: list[dict[str, Any]] = []
        self._batches: deque[tuple[int, bytes]] = deque(maxlen=MAX_BATCHES)
        self._batch_bytes = 0
        self.num_lost = 0  # batches that no socket took

    def start(self) -> None:
        """Open the sockets. Raises StartError, naming the setting."""
        try:
            self._pub = zmq.Context(self._context).socket(zmq.PUB)
            self._pub.set_hwm(HIGH_WATER_MARK)
            _attach(self._pub, self._endpoint)
            if self._replay_endpoint:
                self._replay = self._context.socket(zmq.ROUTER)
                self._replay.bind(self._replay_endpoint)
                _keep_private(self._replay_endpoint)
                self._task = asyncio.get_running_loop().create_task(self._answer_replays())
        except zmq.ZMQError as problem:
            raise StartError(
                f"cannot publish at {self._endpoint} ({problem}); change `observe.kv_events`"
            ) from problem

    async def stop(self) -> None:
        """Close the sockets. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for socket in (self._pub, self._replay):
            if socket is not None:
                socket.close(linger=0)
        self._pub = self._replay = None
        self._context.term()

    def stepped(self, event: Event, instructions: Sequence[Any], now: float) -> None:
        """Gather the block events of a step; what gathers in one turn of the loop is one batch."""
        for instruction in instructions:
            if type(instruction) is Notify:
                if not self._gathered:
                    asyncio.get_running_loop().call_soon(self.publish)
                self._gathered += self._events(instruction)

    def publish(self) -> None:
        """Send what has gathered."""
        events, self._gathered = self._gathered, []
        if not events or self._pub is None:
            return
        number, payload = next(self._numbers), encode(time.time(), events)
        self._remember(number, payload)
        try:
            self._pub.send_multipart((self._topic, number.to_bytes(8, "big"), payload), zmq.NOBLOCK)
        except zmq.Again:
            self.num_lost += 1

    # ------------------------------------------------------------------------------------ internals

    def _remember(self, number: int, payload: bytes) -> None:
        if len(self._batches) == MAX_BATCHES:
            self._batch_bytes -= len(self._batches.popleft()[1])
        self._batches.append((number, payload))
        self._batch_bytes += len(payload)
        while self._batch_bytes > MAX_BATCH_BYTES and len(self._batches) > 1:
            self._batch_bytes -= len(self._batches.popleft()[1])

    def _events(self, notice: Notify) -> Iterator[dict[str, Any]]:
        """Yield vLLM's events for one notice: one per chain when blocks were stored."""
        medium = self._mediums[notice.tier]
        if notice.change is BlockChange.REMOVED:
            yield removed(notice.prefix_hashes, medium)
            return
        namespace = self._catalog.namespaces[notice.namespace_id]
        for parent, chain in chains(
            notice.prefix_hashes, lambda name: self._parent(notice.namespace_id, name)
        ):
            yield stored(chain, parent, namespace.identity.geometry.block_tokens, medium)

    def _parent(self, namespace_id: int, name: bytes) -> bytes | None:
        row = self._catalog.find(namespace_id, name)
        parent = self._catalog.parent[row] if row != NO_ROW else NO_ROW
        return self._catalog.prefix_hash[parent] if parent != NO_ROW else None

    async def _answer_replays(self) -> None:
        while True:
            frames = await self._replay.recv_multipart()
            if len(frames) != 3 or len(frames[2]) != 8:
                log.warning("kv_events: a replay request of %d frames is none", len(frames))
                continue
            client, first = frames[0], int.from_bytes(frames[2], "big")
            for number, payload in list(self._batches):
                if number >= first:
                    await self._replay.send_multipart(
                        (client, b"", self._topic, number.to_bytes(8, "big"), payload)
                    )
            await self._replay.send_multipart((client, b"", b"", END, b""))


def encode(at: float, events: list[dict[str, Any]]) -> bytes:
    """Return a KVEventBatch as vLLM encodes it."""
    return bytes(msgpack.packb([at, events, RANK], use_bin_type=True))


def stored(names: Sequence[bytes], parent: bytes | None, block_tokens: int, medium: str) -> dict[str, Any]:
    """Return a BlockStored: fields without a default always, in order; others only when they differ."""
    return {
        "type": "BlockStored",
        "block_hashes": list(names),
        "parent_block_hash": parent,
        "token_ids": [],
        "block_size": block_tokens,
        "lora_id": None,
        "medium": medium,
        "lora_name": None,
    }


def removed(names: Sequence[bytes], medium: str) -> dict[str, Any]:
    """Return a BlockRemoved."""
    return {"type": "BlockRemoved", "block_hashes": list(names), "medium": medium}


def chains(
    names: Sequence[bytes], parent_of: Callable[[bytes], bytes | None]
) -> Iterator[tuple[bytes | None, list[bytes]]]:
    """Yield (parent of the first, names) for each run of blocks that continue one another."""
    chain: list[bytes] = []
    first_parent: bytes | None = None
    for name in names:
        parent = parent_of(name)
        if chain and parent == chain[-1]:
            chain.append(name)
            continue
        if chain:
            yield first_parent, chain
        chain, first_parent = [name], parent
    if chain:
        yield first_parent, chain


def replay_endpoint_of(endpoint: str) -> str:
    """Return where replays are served; empty where `endpoint` is connected."""
    if not _is_bound(endpoint):
        return ""
    if endpoint.startswith("ipc://"):
        return f"{endpoint}.replay"
    host, _, port = endpoint.rpartition(":")
    return f"{host}:{int(port) + 1}" if port.isdigit() else ""


def _is_bound(endpoint: str) -> bool:
    return "*" in endpoint or "::" in endpoint or endpoint.startswith("ipc://")


def _attach(socket: Any, endpoint: str) -> None:
    if _is_bound(endpoint):
        socket.bind(endpoint)
        _keep_private(endpoint)
    else:
        socket.connect(endpoint)


def _keep_private(endpoint: str) -> None:
    """Let only this user connect to a socket that is a file, whatever the umask."""
    if is_private(endpoint):
        os.chmod(endpoint.removeprefix("ipc://"), 0o600)
