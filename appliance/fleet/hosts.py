"""Hosts: the other hosts, what each says it holds, and how fetching from each goes.

One stream to each, which is also its sign of life: a host that is silent for SILENCE_S, or has another epoch
than before, holds nothing any more. So a host that was restarted is never asked for what it held before.
"""

import asyncio
import logging
import random
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final

import grpc

from ...sources.peers.connection import break_off, is_quiet
from ...sources.peers.inventory import NAME_BYTES, HostInventory, short_names
from ...v1 import peer_pb2 as pb
from ...v1.peer_pb2_grpc import PeerServiceStub
from ...v1.types_pb2 import HostLoad
from .fleet_tls import FleetTls

if TYPE_CHECKING:
    from ...v1.peer_pb2_grpc import PeerServiceAsyncStub

log = logging.getLogger(__name__)

SILENCE_S: Final = 3.0
RETRY_S, MAX_RETRY_S = 0.5, 10.0
MAX_IDLE: Final = 4  # data connections kept for the next fetch, of each host
MAX_FETCHES: Final = 4  # from one host at a time
DISTRUST_S: Final = 60.0  # for which a host that sent other bytes than it announced is not asked
PAUSE_S: Final = 1.0  # for which a host that refused or failed is not asked
MAX_MESSAGE_BYTES: Final = 4 << 20
MAX_HOST_NAME: Final = 64
#: In one message; what an honest host sends is shorter (holdings.py). Half a million took 170 ms of the loop.
MAX_NAMES_AT_ONCE: Final = 20_480
#: For which nothing more is read from a host, of each message and each name in it: five times what it costs.
MESSAGE_PAUSE_S, NAME_PAUSE_S = 5e-4, 1e-6
WEIGHT: Final = 0.3  # of the latest fetch in a host's speed


class FleetHost:
    """One other host. Owned by the event loop, but for `take_idle` and `give_idle`."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.name = ""
        self.epoch = 0
        self.is_live = False
        self.is_self = False
        self.problem = ""  # why it is not live
        self.inventory = HostInventory()
        self.load = HostLoad()
        self.tells_tiers = False
        self.num_fetches = 0  # under way, and waiting for their turn
        self.turns = asyncio.Semaphore(MAX_FETCHES)
        self.pause_until = 0.0
        self.bytes_per_s = 0.0  # of the latest fetches; 0: there was none
        self.counters: Counter[str] = Counter()
        self.stub: PeerServiceAsyncStub | None = None
        self._idle: list[socket.socket] = []
        self._lock = threading.Lock()

    @property
    def ip(self) -> str:
        """Return the host of its address."""
        return self.address.rpartition(":")[0].strip("[]")

    def may_fetch(self, now: float) -> bool:
        """Return whether it may be asked for blocks now."""
        return self.is_live and now >= self.pause_until

    def pause(self, until: float) -> None:
        """Do not ask for blocks for a while."""
        self.pause_until = max(self.pause_until, until)

    def measured(self, num_bytes: int, took_s: float) -> None:
        """Take in how quick a fetch was."""
        speed = num_bytes / max(took_s, 1e-6)
        self.bytes_per_s = speed if not self.bytes_per_s else (1 - WEIGHT) * self.bytes_per_s + WEIGHT * speed

    def take_idle(self) -> socket.socket | None:
        """Return an open data connection; None when there is none."""
        with self._lock:
            while self._idle:
                connection = self._idle.pop()
                if is_quiet(connection):
                    return connection
                connection.close()
        return None

    def give_idle(self, connection: socket.socket) -> None:
        """Keep a data connection for the next fetch."""
        with self._lock:
            if self.is_live and len(self._idle) < MAX_IDLE and is_quiet(connection):
                self._idle.append(connection)
                return
        break_off(connection)

    def forget(self, problem: str) -> None:
        """Forget what it held, and close what is idle."""
        if self.is_live:
            self.counters["lost"] += 1
        self.is_live, self.problem = False, problem
        self.inventory, self.load = HostInventory(), HostLoad()
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()


class Hosts:
    """All other hosts, and a stream from each.

    `digests` returns the namespaces that this host has; `changed` is called when there is a host to ask, or
    none any more."""

    def __init__(
        self,
        epoch: int,
        tls: FleetTls | None,
        digests: Callable[[], frozenset[bytes]],
        changed: Callable[[], None],
    ) -> None:
        self._epoch = epoch
        self._tls = tls
        self._digests = digests
        self._changed = changed
        self._watching: dict[str, asyncio.Task[None]] = {}
        self.by_address: dict[str, FleetHost] = {}

    def set_members(self, addresses: Iterable[str]) -> None:
        """Watch exactly the hosts at these addresses."""
        wanted = set(addresses)
        for address in self.by_address.keys() - wanted:
            self._watching.pop(address).cancel()
            self.by_address.pop(address).forget("it is no member any more")
        for address in sorted(wanted - self.by_address.keys()):
            host = self.by_address[address] = FleetHost(address)
            self._watching[address] = asyncio.create_task(self._watch(host))
        self._changed()

    async def stop(self) -> None:
        """Watch nothing any more. Idempotent."""
        tasks, self._watching = list(self._watching.values()), {}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for host in self.by_address.values():
            host.forget("this host stops")

    def live(self) -> list[FleetHost]:
        """Return the hosts that can be asked."""
        return [host for host in self.by_address.values() if host.is_live]

    def best(self, digest: bytes, names: Sequence[bytes], now: float) -> int:
        """Return how many of `names`, from the first one on, one host says it holds."""
        asked = [host for host in self.by_address.values() if host.may_fetch(now)]
        return max((host.inventory.prefix(digest, names) for host in asked), default=0)

    def holders(self, digest: bytes, names: Sequence[bytes], now: float) -> list[FleetHost]:
        """Return the hosts that may be asked and say that they hold all of `names`, the least busy first."""
        found = [
            host
            for host in self.by_address.values()
            if host.may_fetch(now) and host.inventory.has_all(digest, names)
        ]
        return sorted(found, key=lambda one: (one.num_fetches, one.load.num_tickets, -one.bytes_per_s))

    def num_held(self, digest: bytes, names: Sequence[bytes]) -> int:
        """Return how many of `names` any live host says it holds."""
        packed = short_names(names)
        return sum(map(any, zip(*(host.inventory.has(digest, packed) for host in self.live()), strict=True)))

    # ------------------------------------------------------------------------------------- streams

    async def _watch(self, host: FleetHost) -> None:
        """Follow one host until cancelled."""
        retry_s = RETRY_S
        while True:
            try:
                async with self._channel(host.address) as channel:
                    host.stub = PeerServiceStub(channel)
                    await self._follow(host, host.stub)
                    retry_s = RETRY_S
                    continue  # there are other namespaces now
            except (grpc.aio.AioRpcError, OSError, TimeoutError) as failure:
                problem = _words_of(failure)
            was_live, said = host.is_live, host.problem
            host.forget(problem)
            if was_live:
                retry_s = RETRY_S
                self._changed()
            if said != problem:  # said once, not with every try
                log.warning("host %s is not asked: %s", host.address, problem)
            await asyncio.sleep(retry_s * (0.5 + random.random() / 2))
            retry_s = min(2 * retry_s, MAX_RETRY_S)

    def _channel(self, address: str) -> grpc.aio.Channel:
        options: list[tuple[str, str | int]] = [
            ("grpc.enable_http_proxy", 0),
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ]
        if self._tls is None:
            return grpc.aio.insecure_channel(address, options)
        credentials, more = self._tls.channel()
        return grpc.aio.secure_channel(address, credentials, [*options, *more])

    async def _follow(self, host: FleetHost, stub: "PeerServiceAsyncStub") -> None:
        """Take in what a host says; returns when this host has other namespaces than it was asked for."""
        digests = self._digests()
        call = stub.WatchInventory(pb.WatchInventoryRequest(namespace_digests=sorted(digests)))
        coming = HostInventory()
        try:
            while self._digests() == digests:
                async with asyncio.timeout(SILENCE_S):
                    message = await call.read()
                if not isinstance(message, pb.WatchInventoryResponse):
                    raise OSError("it ended the stream")
                if message.epoch == self._epoch:
                    call.cancel()
                    await _wait_as_self(host)
                if message.epoch != host.epoch:
                    host.forget("it has started anew")
                    host.epoch = message.epoch
                host.name = "".join(filter(str.isprintable, message.host))[:MAX_HOST_NAME]
                host.load, host.tells_tiers = message.load, message.tells_tiers
                if message.is_reset:
                    coming = HostInventory()
                num_names = await _take(coming, message, digests)
                if message.is_complete:
                    host.inventory = coming
                    if not host.is_live:
                        log.info("host %s (%s) is asked from now on", host.address, host.name)
                        host.is_live, host.problem = True, ""
                        self._changed()
                await asyncio.sleep(MESSAGE_PAUSE_S + num_names * NAME_PAUSE_S)
        finally:
            call.cancel()


async def _wait_as_self(host: FleetHost) -> None:
    """Wait for ever: this host is one of the members, and asks itself nothing."""
    host.is_self, host.name, host.problem = True, socket.gethostname(), "this host"
    await asyncio.Event().wait()


async def _take(
    inventory: HostInventory, message: pb.WatchInventoryResponse, digests: frozenset[bytes]
) -> int:
    """Take in changes of namespaces that were asked for; sorting many happens in a thread. Returns how many
    names there were. Raises OSError for more than a host sends at once."""
    num_names = sum(len(one.added) + len(one.removed) for one in message.changes) // NAME_BYTES
    if num_names > MAX_NAMES_AT_ONCE:
        raise OSError(f"it names {num_names} blocks in one message, which no host does")
    for change in message.changes:
        if change.namespace_digest not in digests:
            continue
        to_merge = inventory.change(
            change.namespace_digest, change.added, change.removed, change.added_on_disk
        )
        for names in to_merge:
            names.adopt(*await asyncio.to_thread(names.merged))
    return num_names


def _words_of(failure: Exception) -> str:
    if isinstance(failure, grpc.aio.AioRpcError):
        return f"{failure.code().name}: {failure.details()}"
    return str(failure) or f"silent for {SILENCE_S:g} s"
