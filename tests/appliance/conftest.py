"""A small daemon on a loop of its own."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier.appliance.config import Settings

from .loops import DaemonThread
from .raw_client import RawClient


def small_settings(
    folder: Path, *, nvme: bool = False, write: str = "spill", **sections: dict[str, Any]
) -> Settings:
    """hbm none, dram 8 MiB in extents of 2 MiB, nvme 32 MiB on request, everything else by `sections`.

    Nothing is encoded, and nothing copied to nvme ahead, unless they say so: when `auto` begins to encode,
    and when the device is idle, depends on how quick the machine is.
    """
    tiers: dict[str, Any] = {"dram": {"capacity": "8MiB", "extent": "2MiB"}}
    if nvme:
        nvme_at = {"path": str(folder / "nvme"), "capacity": "32MiB", "segment": "1MiB"}
        tiers["nvme"] = {**nvme_at, "write": write}
    compression = {"codec": "identity"}
    listen = [f"unix://{folder}/k.sock"]
    return Settings.model_validate({"listen": listen, "tiers": tiers, "compression": compression, **sections})


@pytest.fixture
def served(tmp_path: Path) -> Iterator[DaemonThread]:
    """A daemon without a cold store."""
    with DaemonThread(small_settings(tmp_path)) as running:
        yield running


@pytest.fixture
def raw(served: DaemonThread) -> Iterator[RawClient]:
    """An attached client of it."""
    with RawClient(served.daemon.service.facts.local_socket_path) as client:
        client.attach()
        yield client
