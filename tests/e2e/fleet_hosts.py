"""Hosts of a fleet: real daemons on loopback that fetch from each other, and what is put and read there."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from kvtier.clients import Client, Geometry, NamespaceIdentity
from kvtier.v1 import admin_pb2

from ..daemon import PATIENT, Daemon
from ..ports import free_port
from ..sources.directories.servers import Server

#: Four blocks a bundle, of two layer groups.
GEOMETRY = Geometry(
    num_layers=8, num_kv_heads=8, head_dim=64, block_tokens=64, dtype="float16", layers_per_group=4
)
IDENTITY = NamespaceIdentity(hashlib.sha256(b"fleet").digest(), GEOMETRY)
TRANSPORT = os.environ.get("KVTIER_PEERS_TRANSPORT", "tcp")  # nixl: `make test-nixl`
CHAIN_BLOCKS = 30  # more bundles than are fetched at a time; the last two blocks are no whole one


def names_of(chain: int, num_blocks: int = CHAIN_BLOCKS) -> list[bytes]:
    """Return the names of a chain's blocks."""
    return [hashlib.sha256(bytes([chain, number])).digest() for number in range(num_blocks)]


def data_of(chain: int, num_blocks: int = CHAIN_BLOCKS) -> Any:
    """Return the bytes of a chain, uint8."""
    return np.random.default_rng(chain).integers(0, 256, num_blocks * GEOMETRY.block_bytes, np.uint8)


class Host:
    """One daemon, and a client of it. `address` is where other hosts call it."""

    def __init__(self, folder: Path, port: int, peers: Sequence[str], more: dict[str, str]) -> None:
        folder.mkdir(exist_ok=True)
        self.address = f"127.0.0.1:{port}"
        values = {
            "tiers.dram.capacity": "256MiB",
            "tiers.dram.extent": "16MiB",
            "observe.http": "off",
            "peers.hosts": f"[{', '.join(peers)}]",
            "peers.transport": TRANSPORT,
            **more,
        }
        if "access.tls" not in more:
            values["access.insecure"] = "true"
        self.daemon = Daemon(folder, settings=values, arguments=("--listen", self.address))

    @property
    def client(self) -> Client:
        """Return a new client, over the local channel."""
        return Client(self.daemon.target, timeout=PATIENT)

    def status(self) -> admin_pb2.GetStatusResponse:
        """Return what `kvtier status` shows."""
        return self.daemon.status()

    def counter(self, name: str) -> int:
        """Return a counter of the daemon."""
        return self.status().counters[name]

    def register(self, identity: NamespaceIdentity = IDENTITY) -> None:
        """Register the namespace: hosts tell each other of namespaces that both have."""
        with self.client as client:
            client.register(identity)

    def put(self, chain: int, identity: NamespaceIdentity = IDENTITY) -> None:
        """Put a chain."""
        assert self.stores(chain, identity)

    def stores(self, chain: int, identity: NamespaceIdentity = IDENTITY) -> bool:
        """Put a chain, and return whether all of it is stored; what is being fetched may still fail."""
        with self.client as client:
            return client.put(client.register(identity), names_of(chain), data_of(chain)).complete

    def read(self, chain: int, identity: NamespaceIdentity = IDENTITY) -> int:
        """Read a chain: return how many blocks came, each as it was put."""
        with self.client as client:
            got = client.get(client.register(identity), names_of(chain))
            np.testing.assert_array_equal(got.data, data_of(chain)[: got.num_blocks * GEOMETRY.block_bytes])
            return got.num_blocks


@contextmanager
def fleet(folder: Path, num_hosts: int, **more: str) -> Iterator[list[Host]]:
    """Start hosts that know each other, and themselves, by a list that is the same everywhere."""
    ports = [free_port() for _ in range(num_hosts)]
    peers = [f"127.0.0.1:{port}" for port in ports]
    settings = {key.replace("__", "."): value for key, value in more.items()}
    hosts = [Host(folder / f"host{number}", port, peers, settings) for number, port in enumerate(ports)]
    try:
        for host in hosts:
            host.daemon.start()
            host.register()
        yield hosts
        for host in hosts:
            assert "Traceback" not in host.daemon.log.read_text(), host.daemon.log.read_text()
    finally:
        for host in hosts:
            host.daemon.close()


def indexed(folder: Path, server: Server, num_hosts: int) -> AbstractContextManager[list[Host]]:
    """Start hosts with an index."""
    url = f"redis://127.0.0.1:{server.port}"
    more = {"peers__directory__url": url, "peers__directory__index": "true"}
    return fleet(folder, num_hosts, peers__hosts="[]", **more)
