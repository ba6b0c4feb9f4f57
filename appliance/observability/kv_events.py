"""KvEvents: block events for routers, on the wire as vLLM's ZmqEventPublisher puts them there.

    PUB     topic, sequence (8 bytes, big endian), payload = msgpack [time, [event, ...], 0]
    ROUTER  asked for a sequence: every batch from there on, then sequence -1 and no payload

Source: `vllm/distributed/kv_events.py` of vLLM 0.32; tests compare byte by byte with what its classes encode.
`medium` is CPU for hbm and memory, STORAGE for nvme: what routers call GPU are the engine's own pages, ready
to be read by attention. A block is stored in a medium once and removed when its last tier of that medium
gives it up. `block_hashes` are integers, the low 64 bits of the runtime's hashes, as vLLM sends them by
default. `token_ids` is empty, for kvtier never sees tokens: a router that hashes tokens itself has to learn
the hashes from the engine's own events.

A listener that starts late or has missed something asks for a replay. What is older than the remembered
batches is answered with a snapshot: AllBlocksCleared, then what is stored now. Sequences begin at the clock
in microseconds, so that those of a restarted daemon are never taken for old ones, and a subscription is
greeted with a batch without events: its number shows a listener that it has missed something.

Where to connect and where to bind is decided as vLLM does: wildcards and ipc are bound, the rest is
connected. Replays are served beside an endpoint that is bound: at the next port, or at the path with
`.replay` at its end. They are served one at a time and at a bounded rate.

gRPC's Watch (EventsService) says the same with gaps and reasons; this is for what speaks vLLM already. Sends
never block: a subscriber that is slow loses batches, sees the gap in the numbers, and asks for a replay.
"""

import asyncio
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

import msgpack
import zmq
import zmq.asyncio

from ...v1.types import Tier, TierKind
from ..config import is_private
from ..core.catalog.catalog import NO_ROW, Catalog, NamespaceEntry
from ..core.events import Event
from ..core.instructions import BlockChange, Notify
from ..errors import StartError
from ..tasks import Tasks

log = logging.getLogger(__name__)

CPU, STORAGE = "CPU", "STORAGE"
MEDIUM = {TierKind.DEVICE: CPU, TierKind.MEMORY: CPU, TierKind.SEGMENTS: STORAGE}
RANK = 0  # of the only publisher here
MAX_BATCHES = 10_000  # remembered for replays, as many as vLLM does by default
MAX_BATCH_BYTES = 64 << 20  # of those, all together
SLICE_ROWS = 1000  # of the catalog, in a batch of a snapshot: half a millisecond of the loop
REPLAY_BYTES_PER_S = 64 << 20  # a listener that fails at every batch asks after every batch
SEND_TIMEOUT_S = 10.0  # of a replay to a listener that does not read
HIGH_WATER_MARK = 100_000
END = (-1).to_bytes(8, "big", signed=True)
TOPIC = b""  # all subscriptions begin with it
CLEARED = {"type": "AllBlocksCleared"}


class KvEvents:
    """Publishes from `start` to `stop`. Owned by the event loop."""

    def __init__(self, catalog: Catalog, endpoint: str) -> None:
        self._catalog = catalog
        self._mediums = [MEDIUM[spec.kind] for spec in catalog.ladder.specs]
        self._endpoint = endpoint
        self._replay_endpoint = replay_endpoint_of(endpoint)
        self._context = zmq.asyncio.Context()
        self._pub: Any = None
        self._replay: Any = None
        self._tasks: Tasks[None] = Tasks()
        self._number = int(time.time() * 1e6)  # of the next batch
        self._gathered: list[dict[str, Any]] = []
        self._is_due = False
        self._batches: deque[tuple[int, bytes]] = deque(maxlen=MAX_BATCHES)
        self._batch_bytes = 0

    def start(self) -> None:
        """Open the sockets. Raises StartError, naming the setting."""
        try:
            self._pub = self._context.socket(zmq.XPUB)
            self._pub.setsockopt(zmq.XPUB_VERBOSE, 1)  # a second subscription to a topic is heard too
            self._pub.set_hwm(HIGH_WATER_MARK)
            _attach(self._pub, self._endpoint)
            if self._replay_endpoint:
                self._replay = self._context.socket(zmq.ROUTER)
                self._replay.setsockopt(zmq.ROUTER_MANDATORY, 1)  # wait for a slow listener, lose nothing
                self._replay.bind(self._replay_endpoint)
                _keep_private(self._replay_endpoint)
                self._tasks.start(self._answer_replays())
        except zmq.ZMQError as problem:
            raise StartError(
                f"cannot publish at {self._endpoint} ({problem}); change `observe.kv_events`"
            ) from problem
        self._tasks.start(self._greet())
        self._gathered.append(CLEARED)
        self.publish()

    async def stop(self) -> None:
        """Close the sockets. Idempotent."""
        await self._tasks.stop()
        for socket in (self._pub, self._replay):
            if socket is not None:
                socket.close(linger=0)
        self._pub = self._replay = None
        self._context.term()

    def stepped(self, event: Event, instructions: Sequence[Any], now: float) -> None:
        """Gather the block events of a step; what gathers in one turn of the loop is one batch."""
        notices = [instruction for instruction in instructions if type(instruction) is Notify]
        if notices:
            self._gathered += self._events(notices)
        if self._gathered:
            self._publish_soon()

    def publish(self) -> None:
        """Send what has gathered."""
        self._is_due = False
        events, self._gathered = self._gathered, []
        if self._pub is None:
            return
        number, payload = self._number, encode(time.time(), events)
        self._number += 1
        self._remember(number, payload)
        self._pub.send_multipart((TOPIC, number.to_bytes(8, "big"), payload), zmq.NOBLOCK)

    # ------------------------------------------------------------------------------------ internals

    def _publish_soon(self) -> None:
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self.publish)

    async def _greet(self) -> None:
        """Answer each subscription with a batch: its number shows a listener whether it has missed any."""
        while True:
            if (await self._pub.recv()).startswith(b"\x01"):
                self._publish_soon()

    def _remember(self, number: int, payload: bytes) -> None:
        if len(self._batches) == MAX_BATCHES:
            self._batch_bytes -= len(self._batches.popleft()[1])
        self._batches.append((number, payload))
        self._batch_bytes += len(payload)
        while self._batch_bytes > MAX_BATCH_BYTES and len(self._batches) > 1:
            self._batch_bytes -= len(self._batches.popleft()[1])

    def _events(self, notices: Sequence[Notify]) -> Iterator[dict[str, Any]]:
        """Yield vLLM's events for the notices of one step: what has entered a medium, and what has left it.

        A block may enter and leave several tiers of a medium in one step. What was before it follows from the
        first notice of each tier.
        """
        was_in: dict[tuple[int, str], dict[bytes, dict[Tier, bool]]] = {}
        for notice in notices:
            blocks = was_in.setdefault((notice.namespace_id, self._mediums[notice.tier]), {})
            was = notice.change is BlockChange.REMOVED
            for name in notice.prefix_hashes:
                blocks.setdefault(name, {}).setdefault(notice.tier, was)
        for (number, medium), blocks in was_in.items():
            namespace = self._catalog.namespaces.get(number)
            tiers = [tier for tier in self._catalog.ladder.tiers if self._mediums[tier] == medium]
            entered: list[int] = []
            left: list[bytes] = []
            for name, before in blocks.items():
                row = NO_ROW if namespace is None else namespace.rows.get(name, NO_ROW)
                now = {tier: namespace is not None and self._is_in(namespace, row, tier) for tier in tiers}
                had, has = any((now | before).values()), any(now.values())
                if has and not had:
                    entered.append(row)
                elif had and not has:
                    left.append(name)
            if entered and namespace is not None:
                yield from self._stored(namespace, entered, medium)
            if left:
                yield removed(left, medium)

    def _is_in(self, namespace: NamespaceEntry, row: int, tier: Tier) -> bool:
        """Return whether all of a block is readable in a tier."""
        return row != NO_ROW and self._catalog.num_resident[tier][row] == namespace.num_groups

    def _stored(
        self, namespace: NamespaceEntry, rows: Sequence[int], medium: str
    ) -> Iterator[dict[str, Any]]:
        names, parents = self._catalog.prefix_hash, self._catalog.parent
        block_tokens = namespace.identity.geometry.block_tokens
        for chain in chains(rows, parents.__getitem__):
            parent = parents[chain[0]]
            before = names[parent] if parent != NO_ROW else None
            yield stored([names[row] for row in chain], before, block_tokens, medium)

    # -------------------------------------------------------------------------------------- replays

    async def _answer_replays(self) -> None:
        while True:
            frames = await self._replay.recv_multipart()
            if len(frames) != 3 or len(frames[2]) != 8:
                log.warning("kv_events: a replay request of %d frames is none", len(frames))
                continue
            client, first = frames[0], int.from_bytes(frames[2], "big")
            num_bytes = 0
            try:
                for number, payload in self._replayed(first):
                    await self._send(client, TOPIC, number.to_bytes(8, "big"), payload)
                    await asyncio.sleep(0)
                    num_bytes += len(payload)
                await self._send(client, b"", END, b"")
            except (zmq.ZMQError, TimeoutError) as problem:
                log.info("kv_events: a replay ended early: %s", problem or "not read")
            await asyncio.sleep(num_bytes / REPLAY_BYTES_PER_S)

    async def _send(self, client: bytes, topic: bytes, number: bytes, payload: bytes) -> None:
        async with asyncio.timeout(SEND_TIMEOUT_S):
            await self._replay.send_multipart((client, b"", topic, number, payload))

    def _replayed(self, first: int) -> Iterator[tuple[int, bytes]]:
        """Yield (number, payload) of the batches from `first` on, of a snapshot if some are forgotten."""
        if first <= self._batches[0][0]:
            yield from self._snapshot(first)
            return
        yield from [batch for batch in self._batches if batch[0] >= first]

    def _snapshot(self, first: int) -> Iterator[tuple[int, bytes]]:
        """Yield batches for what is stored, the last of them with the newest number.

        Between two of them the catalog may change: what changes is published under higher numbers, which
        listeners apply after a replay, and both events are idempotent.
        """
        num_rows, newest = len(self._catalog.prefix_hash), self._number - 1
        slice_rows = max(SLICE_ROWS, -(-num_rows // max(newest - first, 1)))
        slices = [range(start, start + slice_rows) for start in range(0, num_rows, slice_rows)]
        yield newest - len(slices), encode(time.time(), [CLEARED])
        for number, rows in enumerate(slices, newest - len(slices) + 1):
            yield number, encode(time.time(), list(self._held(rows)))

    def _held(self, rows: range) -> Iterator[dict[str, Any]]:
        """Yield BlockStored for what rows of the catalog hold, by namespace and medium."""
        catalog = self._catalog
        last = min(rows.stop, len(catalog.prefix_hash))
        used = [
            (catalog.namespace_id[row], row) for row in range(rows.start, last) if catalog.prefix_hash[row]
        ]
        for namespace_id, pairs in groupby(sorted(used), itemgetter(0)):
            namespace, members = catalog.namespaces[namespace_id], [row for _, row in pairs]
            for medium in dict.fromkeys(self._mediums):
                tiers = [tier for tier in catalog.ladder.tiers if self._mediums[tier] == medium]
                resident = [catalog.num_resident[tier] for tier in tiers]
                stored_rows = [
                    row for row in members if any(column[row] == namespace.num_groups for column in resident)
                ]
                yield from self._stored(namespace, stored_rows, medium)


def encode(at: float, events: list[dict[str, Any]]) -> bytes:
    """Return a KVEventBatch as vLLM encodes it."""
    return bytes(msgpack.packb([at, events, RANK], use_bin_type=True))


def stored(names: Sequence[bytes], parent: bytes | None, block_tokens: int, medium: str) -> dict[str, Any]:
    """Return a BlockStored: fields without a default always, in order; others only when they differ."""
    return {
        "type": "BlockStored",
        "block_hashes": [short(name) for name in names],
        "parent_block_hash": None if parent is None else short(parent),
        "token_ids": [],
        "block_size": block_tokens,
        "lora_id": None,
        "medium": medium,
        "lora_name": None,
    }


def removed(names: Sequence[bytes], medium: str) -> dict[str, Any]:
    """Return a BlockRemoved."""
    return {"type": "BlockRemoved", "block_hashes": [short(name) for name in names], "medium": medium}


def short(name: bytes) -> int:
    """Return a prefix hash as events have it: its low 64 bits, big endian."""
    return int.from_bytes(name[-8:], "big")


def chains(rows: Sequence[int], parent_of: Callable[[int], int]) -> Iterator[list[int]]:
    """Yield the runs of rows that continue one another."""
    chain: list[int] = []
    for row in rows:
        if chain and parent_of(row) != chain[-1]:
            yield chain
            chain = []
        chain.append(row)
    if chain:
        yield chain


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
