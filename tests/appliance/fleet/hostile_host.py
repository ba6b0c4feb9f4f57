"""A host that belongs to the fleet and does what no host should: says it has everything, and sends something
else, too much, too little, or nothing."""

import math
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import grpc

from kvtier.appliance.config.tenants import Tls
from kvtier.appliance.fleet.fleet_tls import FleetTls
from kvtier.sources.peers.connection import DONE, HEADER, MAGIC, TICKET_BYTES
from kvtier.sources.peers.inventory import short_names
from kvtier.tiers.block import NamespaceIdentity
from kvtier.tiers.payload import checksum
from kvtier.v1 import peer_pb2 as pb
from kvtier.v1.peer_pb2_grpc import PeerServiceServicer, add_PeerServiceServicer_to_server
from kvtier.v1.types_pb2 import HostLoad

#: What it does after it was asked for blocks that it said it has.
TRICKS = (
    "other bytes",
    "too little",
    "too much",
    "nothing",
    "endless header",
    "closes at once",
    "no data port",
    "another number",
    "empty ticket",
    "refuses",
    "never answers",
    "leaves while it is asked",
    "drips",
)
DRIP_S = 0.05


class HostileHost(PeerServiceServicer):
    """Serves PeerService and data connections with one trick, until `close`.

    `tls`: the files of a host, where it proves that it is one."""

    def __init__(
        self,
        trick: str,
        identity: NamespaceIdentity,
        names: Sequence[bytes],
        epoch: int = 7,
        tls: Tls | None = None,
    ) -> None:
        self.trick = trick
        self.epoch = epoch
        self.tells_tiers = True  # False: and its load, as a host of an older version
        self.oldest = 0  # protocol that it speaks at the least; 0: it does not say
        self.nixl_version = ""  # with which it says it can push
        self.push: Callable[[pb.PushBlocksRequest], pb.PushBlocksResponse] | None = None
        self.num_asked = 0
        self.num_connections = 0
        self._identity = identity
        self._names = names
        self._ended = threading.Event()
        self._server = grpc.server(ThreadPoolExecutor(32))
        add_PeerServiceServicer_to_server(self, self._server)
        self._tls = FleetTls(tls, "") if tls is not None else None
        if tls is None:
            self.port = self._server.add_insecure_port("127.0.0.1:0")
        else:
            assert tls.client_ca is not None
            key, certificate, ca = (path.read_bytes() for path in (tls.key, tls.certificate, tls.client_ca))
            credentials = grpc.ssl_server_credentials([(key, certificate)], ca, require_client_auth=True)
            self.port = self._server.add_secure_port("127.0.0.1:0", credentials)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._server.start()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """End everything."""
        self._ended.set()
        self._listener.close()
        self._server.stop(0).wait()

    def WatchInventory(  # noqa: N802
        self, request: pb.WatchInventoryRequest, context: Any
    ) -> Iterator[pb.WatchInventoryResponse]:
        """Say that it has all blocks, and blocks of a namespace that was not asked for."""
        changes = [
            pb.InventoryChange(
                namespace_digest=digest,
                added=short_names(self._names),
                added_on_disk=short_names(self._names) + b"half",
            )
            for digest in (self._identity.digest, b"other" * 6 + b"!!")
        ]
        load = HostLoad(max_tickets=99)
        if self.tells_tiers:
            load.disk_wait_s, load.disk_bytes_per_s, load.memory_free_share = math.nan, -1.0, math.inf
        yield pb.WatchInventoryResponse(
            epoch=self.epoch,
            host="h" * 500,
            is_reset=True,
            protocol=self.oldest,
            oldest=self.oldest,
            is_complete=True,
            changes=changes,
            load=load,
            tells_tiers=self.tells_tiers,
        )
        num_asked = self.num_asked
        while not self._ended.wait(0.1) and context.is_active():
            if self.trick == "leaves while it is asked" and self.num_asked > num_asked:
                return
            yield pb.WatchInventoryResponse(
                epoch=self.epoch, host="h", load=load, tells_tiers=self.tells_tiers
            )

    def AwaitBlocks(  # noqa: N802
        self, request: pb.AwaitBlocksRequest, context: Any
    ) -> Iterator[pb.AwaitBlocksResponse]:
        """Say that it has some blocks, fewer, and more than were asked about."""
        for number in (2, 1, 1 << 31):
            yield pb.AwaitBlocksResponse(num_blocks=number)
        if self.trick in ("nothing", "drips"):
            self._ended.wait(60)

    def FetchBlocks(  # noqa: N802
        self, request: pb.FetchBlocksRequest, context: Any
    ) -> pb.FetchBlocksResponse:
        """Return a ticket, or what looks like one."""
        self.num_asked += 1
        num_blocks = len(request.prefix_hashes) // 32
        num_payloads = num_blocks * self._identity.geometry.num_groups
        if self.trick == "refuses":
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "no")
        if self.trick in ("never answers", "leaves while it is asked"):
            self._ended.wait(60)
        if self.trick == "empty ticket":
            return pb.FetchBlocksResponse()
        return pb.FetchBlocksResponse(
            ticket=num_payloads.to_bytes(TICKET_BYTES),
            data_port=70_000 if self.trick == "no data port" else self._listener.getsockname()[1],
            num_blocks=num_blocks + (self.trick == "another number"),
            checksums=checksum(memoryview(b"what was put")) * num_payloads,
            nixl_version=self.nixl_version,
        )

    def PushBlocks(  # noqa: N802
        self, request: pb.PushBlocksRequest, context: Any
    ) -> pb.PushBlocksResponse:
        """Do what the test says."""
        if self.push is None:
            context.abort(grpc.StatusCode.UNIMPLEMENTED, "an older host")
        assert self.push is not None
        return self.push(request)

    def _accept(self) -> None:
        while not self._ended.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.num_connections += 1
            threading.Thread(target=self._send, args=(connection,), daemon=True).start()

    def _send(self, connection: socket.socket) -> None:
        geometry = self._identity.geometry
        payload = b"x" * geometry.block_bytes
        with ExitStack() as stack:
            stack.enter_context(connection)
            try:
                if self._tls is not None:
                    connection = self._tls.context(is_server=True).wrap_socket(connection, server_side=True)
                    stack.enter_context(connection)
                num_payloads = int.from_bytes(connection.recv(TICKET_BYTES))
                header, num_blocks = HEADER.pack(MAGIC, num_payloads), num_payloads // geometry.num_groups
                match self.trick:
                    case "other bytes":
                        connection.sendall(header + payload * num_blocks)
                        connection.recv(len(DONE))
                    case "too little":
                        connection.sendall(header + payload)
                    case "too much":
                        while not self._ended.is_set():
                            connection.sendall(header + payload * num_blocks * 2)
                    case "endless header":
                        while not self._ended.is_set():
                            connection.sendall(b"kvtr" * 1024)
                    case "nothing":
                        self._ended.wait(60)
                    case "drips":
                        connection.sendall(header)
                        while not self._ended.wait(DRIP_S):
                            connection.sendall(b"x")
            except OSError:  # the fetcher left
                return


def patience() -> float:
    """Return a time until which a test waits at most."""
    return time.monotonic() + 120.0
