"""kvtier itself: a real daemon in a process of its own and the synchronous client, as a runtime on this host
uses them.

One namespace per fragment size, of a model of one layer with blocks of exactly that many bytes. The client's
source buffer lies in its staging extent (`client.staging`), which is the form Mooncake's registered buffers
have; the plain form is an ordinary array, which the client copies into staging first.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import grpc
import numpy as np

from bench.worker import GIB, MAX_BATCH_BYTES, MIB, Adapter, Process, serve, work_directory
from kvtier.clients.errors import KvtierError
from kvtier.clients.options import Limits
from kvtier.clients.sync import Client
from kvtier.v1 import admin_pb2, admin_pb2_grpc, types_pb2
from kvtier.v1.types import Geometry, NamespaceIdentity

STAGING_BYTES = MAX_BATCH_BYTES + 64 * MIB  # what `source` takes, and room for the pieces of plain puts
BYTES_PER_HEAD = 16 * 128


class Kvtier(Adapter):
    forms = ("staging", "plain")

    def __init__(self) -> None:
        self.daemon: Process | None = None
        self.client: Client | None = None
        self.directory = work_directory()

    def start(self, pool_bytes: int, spill: bool) -> str:
        directory = Path(self.directory.name)
        address = f"unix://{directory}/kvtier.sock"
        settings = [f"tiers.dram.capacity={pool_bytes // MIB}MiB"]
        settings += [f"limits.staging_per_client={STAGING_BYTES // MIB}MiB"]
        if spill:
            (directory / "cold").mkdir()
            settings += [f"tiers.nvme.path={directory}/cold", f"tiers.nvme.capacity={8 * GIB // MIB}MiB"]
            settings += ["tiers.nvme.write=spill"]  # the peers write when they must
        command = [sys.executable, "-m", "kvtier.appliance.cli", "serve", "--listen", address]
        for setting in settings:
            command += ["--set", setting]
        self.daemon = Process(command, directory / "daemon.log")
        self.daemon.wait_until(lambda: self._answers(address))
        # Fresh pages come at a fraction of memory's speed; the peers' pools are touched beforehand, too.
        self.daemon.wait_until(lambda: "memory in place" in (directory / "daemon.log").read_text())
        self.connect(address)
        return address

    def connect(self, address: str) -> None:
        self.client = Client(address, limits=Limits(staging_bytes=STAGING_BYTES))
        self.admin = admin_pb2_grpc.AdminServiceStub(
            grpc.insecure_channel(address.replace("unix://", "unix:"))
        )
        self.staging = self.client.staging(MAX_BATCH_BYTES).array.view(np.uint64)
        self.target = np.ones(MAX_BATCH_BYTES // 8, np.uint64)

    def select(self, size: int, batch: int) -> None:
        assert self.client is not None
        words = batch * size // 8
        self.source = self.staging[:words].reshape(1, batch, -1)
        self.dest = self.target[:words].reshape(1, batch, -1)
        self.plain = np.ones_like(self.source)
        geometry = Geometry(
            num_layers=1,
            num_kv_heads=size // BYTES_PER_HEAD,
            head_dim=128,
            block_tokens=16,
            dtype="int8",
            num_planes=1,
        )
        digest = hashlib.sha256(b"bench %d" % size).digest()
        self.namespace = self.client.register(NamespaceIdentity(model_digest=digest, geometry=geometry))

    def names(self, chain: int, num: int) -> bytes:
        return b"".join(hashlib.blake2b(b"%d %d" % (chain, i), digest_size=32).digest() for i in range(num))

    def put(self, names: bytes, form: str) -> int:
        assert self.client is not None
        data = self.source if form == "staging" else self.plain
        report = self.client.put(self.namespace, names, data[0, : len(names) // 32])
        return report.num_stored + report.num_deduplicated

    def get(self, names: bytes) -> int:
        assert self.client is not None
        return self.client.get(self.namespace, names, into=self.dest[0, : len(names) // 32]).num_loaded

    def lookup(self, names: bytes) -> int:
        assert self.client is not None
        return self.client.lookup(self.namespace, names).num_blocks

    def wipe(self) -> None:
        self.admin.Evict(admin_pb2.EvictRequest(tier=types_pb2.TIER_DRAM, bytes=0), timeout=60)

    def stop(self) -> None:
        if self.client is not None:
            self.client.close()
        if self.daemon is not None:
            self.daemon.stop()

    def _answers(self, address: str) -> bool:
        try:
            with Client(address) as client:
                assert client.info.version
        except KvtierError:
            return False
        return True


if __name__ == "__main__":
    serve(Kvtier())
