"""A profile through the real daemon: who names it is stored by it, nobody else loses a bit, and it is refused
where it does not belong."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from kvtier.clients import Client, Geometry, NamespaceIdentity
from kvtier.clients.errors import KvtierError
from kvtier.tiers.codecs.base import Shape
from kvtier.tiers.codecs.lossy.profile import Profile, uniform_rules
from kvtier.tiers.codecs.lossy.profile_file import write_profile
from kvtier.tiers.codecs.lossy.profiled import Profiled

from ..contracts.kv_values import values_like_kv
from ..daemon import PATIENT, Daemon

MODEL = hashlib.sha256(b"profiled").digest()
GEOMETRY = Geometry(
    num_layers=4, num_kv_heads=4, head_dim=64, block_tokens=16, dtype="bfloat16", layers_per_group=2
)
WHOLE = Shape(4, 2, 16, 4, 64, "bfloat16")
PROFILE = Profile(MODEL, 4, 4, 64, 2, "bfloat16", uniform_rules(4, 2, 4, "int", 4))
NUM_BLOCKS = 12
NAMES = [hashlib.sha256(b"p%d" % i).digest() for i in range(NUM_BLOCKS)]


def daemon_of(tmp_path: Path) -> Daemon:
    """Return a daemon with a cold store and a directory of profiles, in which there is PROFILE."""
    settings = {
        "tiers.dram.capacity": "8MiB",
        "tiers.dram.extent": "2MiB",
        "tiers.nvme.path": str(tmp_path / "cold"),
        "tiers.nvme.capacity": "16MiB",
        "tiers.nvme.segment": "1MiB",
        "compression.profiles": str(tmp_path / "profiles"),
    }
    for name in ("cold", "profiles"):
        (tmp_path / name).mkdir()
    write_profile(PROFILE, tmp_path / "profiles" / "four-bits.yaml")
    return Daemon(tmp_path, settings=settings)


def decoded(blocks: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return blocks after a way through the cold store, computed here, group by group as they are stored."""
    codec = Profiled(PROFILE)
    shape = WHOLE._replace(num_layers=2)
    result = []
    for i, fragment in enumerate(blocks.reshape(2 * NUM_BLOCKS, -1)):
        mine = shape._replace(first_layer=i % 2 * 2)
        stored, target = bytearray(codec.stored_bound(mine)), np.empty(shape.raw_bytes, np.uint8)
        codec.encode(mine, fragment.data, memoryview(stored))
        codec.decode(mine, memoryview(stored), target.data)
        result.append(target)
    return np.concatenate(result)


def test_only_who_names_a_profile_is_stored_by_it(tmp_path: Path) -> None:
    data = np.concatenate([values_like_kv(WHOLE, seed) for seed in range(NUM_BLOCKS)])
    lossy = NamespaceIdentity(MODEL, GEOMETRY, profile_digest=PROFILE.digest)
    exact = NamespaceIdentity(MODEL, GEOMETRY)
    expected = decoded(data)  # before a daemon reads: it loads what was compiled for this
    with daemon_of(tmp_path) as daemon:
        with Client(daemon.target, timeout=PATIENT) as client:
            for identity in (lossy, exact):
                assert client.put(client.register(identity), NAMES, data).complete
            assert (client.get(client.register(lossy), NAMES).data == data).all()  # dram keeps what was put
        for _ in range(2):  # the second time what was loaded is spilled again: nothing is lost twice
            assert daemon.stop() == 0
            daemon.start()
            with Client(daemon.target, timeout=PATIENT) as client:
                np.testing.assert_array_equal(client.get(client.register(exact), NAMES).data, data)
                report = client.get(client.register(lossy), NAMES)
                np.testing.assert_array_equal(report.data, expected)
                assert not (report.data == data).all()
        assert daemon.stop() == 0
        path = tmp_path / "profiles" / "four-bits.yaml"
        path.rename(tmp_path / "elsewhere.yaml")
        daemon.start()
        with Client(daemon.target, timeout=PATIENT) as client:
            with pytest.raises(KvtierError, match="no profile"):
                client.register(lossy)
            np.testing.assert_array_equal(client.get(client.register(exact), NAMES).data, data)
        assert daemon.stop() == 0
        (tmp_path / "elsewhere.yaml").rename(path)
        daemon.start()
        with Client(daemon.target, timeout=PATIENT) as client:  # nothing was lost meanwhile
            report = client.get(client.register(lossy), NAMES)
            np.testing.assert_array_equal(report.data, expected)


def test_a_profile_of_another_model_is_refused(tmp_path: Path) -> None:
    with daemon_of(tmp_path) as daemon, Client(daemon.target, timeout=PATIENT) as client:
        other = NamespaceIdentity(b"o" * 32, GEOMETRY, profile_digest=PROFILE.digest)
        with pytest.raises(KvtierError, match="it is of model"):
            client.register(other)
        fewer = Geometry(num_layers=4, num_kv_heads=2, head_dim=64, block_tokens=16, dtype="bfloat16")
        with pytest.raises(KvtierError, match="num_kv_heads is 4, the namespace's is 2"):
            client.register(NamespaceIdentity(MODEL, fewer, profile_digest=PROFILE.digest))
