"""Blocks that rest compressed on nvme, through the real daemon: the same bytes, less of them, also after a
restart and after the policy chose otherwise."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from kvtier.clients import Client, Geometry, NamespaceIdentity
from kvtier.tiers.codecs.base import Shape
from kvtier.tiers.codecs.registry import codec_named

from ..contracts.kv_values import values_like_kv
from ..daemon import PATIENT, Daemon

GEOMETRY = Geometry(
    num_layers=4, num_kv_heads=4, head_dim=64, block_tokens=16, dtype="bfloat16", layers_per_group=2
)
IDENTITY = NamespaceIdentity(hashlib.sha256(b"compressed").digest(), GEOMETRY)
SHAPE = Shape(2, 2, 16, 4, 64, "bfloat16")  # of a fragment
NUM_BLOCKS = 24
NAMES = [hashlib.sha256(b"c%d" % i).digest() for i in range(NUM_BLOCKS)]


def blocks_like_kv() -> NDArray[np.uint8]:
    """Return blocks as a transformer makes them; the last one is noise, which no codec makes shorter."""
    whole = SHAPE._replace(num_layers=GEOMETRY.num_layers)
    data = np.concatenate([values_like_kv(whole, seed) for seed in range(NUM_BLOCKS)])
    noise = np.random.default_rng(1).integers(0, 256, GEOMETRY.block_bytes, np.uint8)
    data[-GEOMETRY.block_bytes :] = noise
    return data


@pytest.mark.parametrize("codec", ["exponents", "planes"])
def test_blocks_on_nvme_take_less_and_are_the_same(tmp_path: Path, codec: str) -> None:
    settings = {
        "tiers.dram.capacity": "8MiB",
        "tiers.dram.extent": "2MiB",
        "tiers.nvme.path": str(tmp_path / "cold"),
        "tiers.nvme.capacity": "16MiB",
        "tiers.nvme.segment": "1MiB",
        "compression.codec": codec,
    }
    (tmp_path / "cold").mkdir()
    with Daemon(tmp_path, settings=settings) as daemon:
        data = blocks_like_kv()
        with Client(daemon.target, timeout=PATIENT) as client:
            namespace = client.register(IDENTITY)
            assert client.put(namespace, NAMES, data).complete
        assert daemon.stop() == 0  # drains: everything is in the cold store now
        daemon.start()
        with Client(daemon.target, timeout=PATIENT) as client:
            nvme = next(tier for tier in daemon.status().tiers if tier.tier == 3)
            bound = codec_named(codec).stored_bound(SHAPE)
            least = 2 * (NUM_BLOCKS - 1) * bound + GEOMETRY.block_bytes  # the noise as it is
            assert least <= nvme.used_bytes < 0.9 * data.nbytes
            namespace = client.register(IDENTITY)
            report = client.get(namespace, NAMES)
            np.testing.assert_array_equal(report.data, data)
            assert daemon.audit() == []
