"""`kvtier evict` against the real daemon: what leaves nvme is not found again, however the daemon ends."""

import hashlib
import json
from pathlib import Path
from signal import SIGKILL
from typing import Any

from kvtier.clients import Client, Geometry, NamespaceIdentity

from ..cli.conftest import run
from ..daemon import Daemon

GEOMETRY = Geometry(num_layers=4, num_kv_heads=2, head_dim=128, block_tokens=16, dtype="bfloat16")
IDENTITY = NamespaceIdentity(hashlib.sha256(b"evict").digest(), GEOMETRY)
NUM_BLOCKS = 64


def status(daemon: Daemon) -> Any:
    """Return what `kvtier status` says."""
    return json.loads(run("status", "--json", target=daemon.target).stdout)


def used_bytes(daemon: Daemon) -> dict[str, int]:
    """Return the readable bytes of each tier."""
    return {tier["tier"]: tier["used_bytes"] for tier in status(daemon)["tiers"]}


def test_an_emptied_cold_store_is_empty_after_a_crash(tmp_path: Path) -> None:
    values = {
        "tiers.dram.capacity": "8MiB",
        "tiers.dram.extent": "2MiB",
        "tiers.nvme.path": str(tmp_path / "nvme"),
        "tiers.nvme.capacity": "16MiB",
        "tiers.nvme.segment": "2MiB",
        "observe.http": "off",
    }
    chain = [hashlib.sha256(bytes([number])).digest() for number in range(NUM_BLOCKS)]
    with Daemon(tmp_path, settings=values) as daemon:
        with Client(daemon.target) as client:
            namespace = client.register(IDENTITY)
            client.put(namespace, chain, bytes(NUM_BLOCKS * GEOMETRY.block_bytes), session="s")
        assert daemon.stop() == 0  # a drain writes all of it to nvme
        daemon.start()
        assert status(daemon)["num_blocks"] == NUM_BLOCKS
        answer = json.loads(run("evict", "nvme", "all", "--json", target=daemon.target).stdout)
        assert (answer["num_blocks"], answer["num_readable"], answer["num_kept"]) == (NUM_BLOCKS, 0, {})
        assert status(daemon)["num_blocks"] == 0
        daemon.signal(SIGKILL)
        daemon.wait()
        daemon.start()
        assert status(daemon)["num_blocks"] == 0
        assert used_bytes(daemon)["nvme"] == 0
