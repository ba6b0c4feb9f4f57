"""FleetHost: one other host, as it is known here, and how fetching from it goes."""

import asyncio
import socket
import threading
from collections import Counter
from time import monotonic
from typing import TYPE_CHECKING, Final

import grpc

from ...sources.peers.connection import IDLE_S, break_off, is_quiet
from ...sources.peers.inventory import HostInventory
from ...v1.types_pb2 import HostLoad
from ..core.shares import Shares
from .fetch_turns import FetchTurns
from .fleet_tls import FleetTls

if TYPE_CHECKING:
    from ...v1.peer_pb2_grpc import PeerServiceAsyncStub

MAX_IDLE: Final = 4  # data connections kept for the next fetch, of each host
MAX_FETCHES: Final = 4  # from one host at a time
#: Chains awaited at one host, each by a stream: of the 32 of its channel half are left for tickets and the
#: inventory. Of one isolation domain as many as it leaves free.
MAX_AWAITS: Final = 16
DISTRUST_S: Final = 60.0  # for which a host that sent other bytes than it announced is not asked
PAUSE_S: Final = 1.0  # for which a host that refused or failed is not asked
MAX_PAUSE_S: Final = 8.0  # and one that keeps silent, time after time
MAX_MESSAGE_BYTES: Final = 4 << 20
WEIGHT: Final = 0.3  # of the latest fetch in a host's speed


class FleetHost:
    """One other host. Owned by the event loop, but for `take_idle` and `give_idle`."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.name = ""
        self.epoch = 0
        self.is_live = False
        self.is_streaming = True  # what it holds, and by that whether it lives
        self.is_self = False
        self.problem = ""  # why it is not live
        self.inventory = HostInventory()
        self.load = HostLoad()
        self.tells_tiers = False
        self.num_fetches = 0  # under way, and waiting for their turn
        self.turns = FetchTurns(MAX_FETCHES)
        self.awaits = Shares(MAX_AWAITS)
        self.pause_until = 0.0
        self.push_after = 0.0  # before it, it is not asked to push
        self.bytes_per_s = 0.0  # of the latest fetches; 0: there was none
        self.counters: Counter[str] = Counter()
        self.stub: PeerServiceAsyncStub | None = None
        self._num_silent = 0  # times in a row that it did not answer
        self._idle: list[tuple[float, socket.socket]] = []  # since when
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

    def failed(self, now: float, *, is_silent: bool) -> None:
        """Do not ask for blocks for a moment; for twice as long each time while it is silent."""
        self._num_silent = self._num_silent + 1 if is_silent else 0
        self.pause(now + min(PAUSE_S * 2 ** max(0, self._num_silent - 1), MAX_PAUSE_S))

    def measured(self, num_bytes: int, took_s: float) -> None:
        """Take in how quick a fetch was."""
        self._num_silent = 0
        speed = num_bytes / max(took_s, 1e-6)
        self.bytes_per_s = speed if not self.bytes_per_s else (1 - WEIGHT) * self.bytes_per_s + WEIGHT * speed

    def take_idle(self) -> socket.socket | None:
        """Return an open data connection; None when there is none."""
        with self._lock:
            while self._idle:
                since, connection = self._idle.pop()
                if monotonic() - since < IDLE_S / 2 and is_quiet(connection):
                    return connection
                connection.close()
        return None

    def give_idle(self, connection: socket.socket) -> None:
        """Keep a data connection for the next fetch."""
        with self._lock:
            if self.is_live and len(self._idle) < MAX_IDLE and is_quiet(connection):
                self._idle.append((monotonic(), connection))
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
        for _, connection in idle:
            connection.close()


def is_cancelled() -> bool:
    """Return whether the task is to end, and not only a call in it, of a closed channel."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def open_channel(address: str, tls: FleetTls | None) -> grpc.aio.Channel:
    """Return a channel to a host, which connects when it is used. Raises OSError."""
    options: list[tuple[str, str | int]] = [
        ("grpc.enable_http_proxy", 0),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ]
    if tls is None:
        return grpc.aio.insecure_channel(address, options)
    credentials, more = tls.channel()
    return grpc.aio.secure_channel(address, credentials, [*options, *more])
