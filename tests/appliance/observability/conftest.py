"""A small daemon that has stored more than it holds, was asked for some of it, and shows itself."""

import hashlib
import http.client
import itertools
import json
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest

from kvtier.appliance.config import Settings
from kvtier.clients import Client, Geometry, NamespaceIdentity

from ...waiting import until
from ..loops import DaemonThread

GEOMETRY = Geometry(
    num_layers=4, num_kv_heads=2, head_dim=128, block_tokens=16, dtype="bfloat16", layers_per_group=2
)
IDENTITY = NamespaceIdentity(hashlib.sha256(b"sight").digest(), GEOMETRY)
CHAIN_BLOCKS = 24


def names(chain: str, num_blocks: int = CHAIN_BLOCKS) -> list[bytes]:
    """Return the prefix hashes of a chain."""
    return [hashlib.sha256(f"{chain} {i}".encode()).digest() for i in range(num_blocks)]


class Shown:
    """A daemon and its HTTP listener, seen from outside."""

    def __init__(self, served: DaemonThread) -> None:
        self.served = served
        self.daemon = served.daemon
        self.target = self.daemon.grpc.addresses[0]

    def request(self, method: str, path: str, headers: dict[str, str] | None = None) -> tuple[int, str]:
        """Return status and body of one request to the listener."""
        assert self.daemon.observability.http is not None
        connection = http.client.HTTPConnection(
            urlsplit(self.daemon.observability.http.address).netloc, timeout=60
        )
        try:
            connection.request(method, path, headers=headers or {})
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def header(self, path: str, name: str) -> str:
        """Return a header of what a path answers."""
        assert self.daemon.observability.http is not None
        with urllib.request.urlopen(self.daemon.observability.http.address + path, timeout=60) as answer:
            return str(answer.headers[name])

    def get(self, path: str) -> str:
        """Return what a path answers well."""
        status, body = self.request("GET", path)
        assert status == 200, body
        return body

    def snapshot(self) -> Any:
        """Return the value of /api/snapshot."""
        return json.loads(self.get("/api/snapshot"))

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition holds: what is shown is counted every half second at most."""
        until(condition, "never true")

    def audit(self) -> list[str]:
        """Audit the daemon."""
        return self.served.call(self.daemon.check_integrity)


Start = Callable[..., Shown]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start daemons: hbm none, dram 2 MiB (32 blocks), `further` tiers, nvme 16 MiB unless `nvme=False`.
    `again=True`: end the last one, and start another on its cold store. `objects`: the settings of
    an object store."""
    running: list[DaemonThread] = []

    folders = itertools.count()

    def make(
        nvme: bool = True,
        again: bool = False,
        further: Any = None,
        objects: Any = None,
        dram: str = "2MiB",
        more: Any = None,
        **observe: object,
    ) -> Shown:
        if again:
            running.pop().__exit__(None, None, None)
            folder = max(tmp_path.iterdir(), key=lambda path: int(path.name))
        else:
            folder = tmp_path / str(next(folders))
            folder.mkdir()
        tiers: dict[str, object] = {"dram": {"capacity": dram, "extent": "2MiB"}, **(further or {})}
        if nvme:
            nvme_at = {"path": str(folder / "data"), "capacity": "16MiB", "segment": "2MiB"}
            tiers["nvme"] = {**nvme_at, "write": "spill"}
        settings = Settings.model_validate(
            {
                "listen": [f"unix://{folder}/k.sock"],
                "tiers": tiers,
                "policy": {"eviction": "lru"},
                "compression": {"codec": "zstd"},
                "object": objects or {},
                "observe": {"http": "127.0.0.1:0", **observe},
                **(more or {}),
            }
        )
        served = DaemonThread(settings)
        served.__enter__()
        running.append(served)
        return Shown(served)

    yield make
    for served in running:
        served.__exit__(None, None, None)


def use(shown: Shown, session_id: str = "s", chains: int = 3) -> None:
    """Put three chains, more than dram holds, and read them back: some are there, some are below, and of one
    twice as much is asked for as there is."""
    data = np.random.default_rng(5).integers(0, 16, CHAIN_BLOCKS * GEOMETRY.block_bytes, np.uint8)
    with Client(shown.target) as client:
        namespace = client.register(IDENTITY)
        for number in range(chains):
            client.put(namespace, names(str(number)), data, session=session_id)
        for number in reversed(range(chains)):
            client.get(namespace, names(str(number)), session=session_id)
        client.get(namespace, names("0", 2 * CHAIN_BLOCKS), session=session_id)
