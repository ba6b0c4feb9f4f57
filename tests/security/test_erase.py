"""A daemon that encrypts what it stores: what its disk shows, what is left of a tenant that was erased."""

import errno
import hashlib
import os
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from kvtier.appliance.config import COMMON, Loaded, Settings
from kvtier.appliance.errors import StartError
from kvtier.clients import Client, Geometry, NamespaceIdentity
from kvtier.tiers.encryption import keyring
from kvtier.v1 import admin_pb2 as pb
from kvtier.v1 import types_pb2
from kvtier.v1.admin_pb2_grpc import AdminServiceStub
from kvtier.v1.errors import DETAIL_KEY

from ..appliance.conftest import small_settings
from ..appliance.loops import DaemonThread

GEOMETRY = Geometry(num_layers=2, num_kv_heads=2, head_dim=64, block_tokens=16, dtype="bfloat16")
IDENTITY = NamespaceIdentity(hashlib.sha256(b"erase").digest(), GEOMETRY)
NAMES = [hashlib.sha256(bytes([i])).digest() for i in range(24)]
PLANTED = b"a prompt nobody else may ever read; "
TIMEOUT_S = 60.0


def settings_in(folder: Path, *, is_encrypted: bool = True, **sections: Any) -> Settings:
    if is_encrypted:
        key = folder / "master.key"
        if not key.exists():
            key.touch(0o600)
            key.write_text(os.urandom(32).hex())
        sections["encryption"] = {"master_key": str(key)}
    sections.setdefault("tenants", {"acme": {"members": [f"uid:{os.getuid()}"]}})
    compression = {"codec": "identity"}
    return small_settings(folder, nvme=True, compression=compression, **sections)


class Served:
    """A daemon, a client of it, and its administrator."""

    def __init__(self, settings: Settings, source: Loaded | None = None) -> None:
        self.running = DaemonThread(source or settings)
        self._address = settings.listen[0]

    def __enter__(self) -> "Served":
        self.running.__enter__()
        self.client = Client(self._address)
        self.client.__enter__()
        self.namespace = self.client.register(IDENTITY)
        self._channel = grpc.insecure_channel(self._address)
        self.admin: Any = AdminServiceStub(self._channel)
        return self

    def __exit__(self, *ends: object) -> None:
        self.client.__exit__(None, None, None)
        self._channel.close()
        self.running.__exit__(None, None, None)

    def put(self, names: list[bytes]) -> np.ndarray[Any, np.dtype[np.uint8]]:
        text = PLANTED * (len(names) * GEOMETRY.block_bytes // len(PLANTED) + 1)
        data = np.frombuffer(text, np.uint8, len(names) * GEOMETRY.block_bytes).copy()
        for number in range(len(names)):
            data[number * GEOMETRY.block_bytes] = number
        assert self.client.put(self.namespace, names, data, session="writer").complete
        return data

    def num_found(self, names: list[bytes] = NAMES) -> int:
        found: int = self.client.lookup(self.namespace, names).num_blocks
        return found

    def push_out(self) -> None:
        """What was put leaves dram for nvme."""
        self.client.session("writer").end(archive=True)
        self.running.wait(self.running.daemon.appliance.settled())
        self.admin.Evict(pb.EvictRequest(tier=types_pb2.TIER_DRAM), timeout=TIMEOUT_S)
        assert self.tiers_with_bytes() == {"TIER_NVME"}

    def erase(self, name: str = "acme") -> Any:
        return self.admin.EraseTenant(pb.EraseTenantRequest(name=name), timeout=TIMEOUT_S)

    def tiers_with_bytes(self) -> set[str]:
        tiers = self.admin.GetStatus(pb.GetStatusRequest(), timeout=TIMEOUT_S).tiers
        return {types_pb2.Tier.Name(tier.tier) for tier in tiers if tier.used_bytes}


def reason_of(refused: Any) -> str:
    return str(types_pb2.ErrorDetail.FromString(dict(refused.value.trailing_metadata())[DETAIL_KEY]).reason)


@pytest.mark.parametrize("is_encrypted", [True, False])
def test_a_planted_prompt_is_on_no_segment(tmp_path: Path, is_encrypted: bool) -> None:
    """The control, without encryption, finds it. With it the disk gives back what was put all the same."""
    with Served(settings_in(tmp_path, is_encrypted=is_encrypted)) as served:
        data = served.put(NAMES)
        served.push_out()
        report = served.client.get(served.namespace, NAMES)
        np.testing.assert_array_equal(report.data, data)
    found = b"".join(path.read_bytes() for path in (tmp_path / "nvme").iterdir())
    assert (PLANTED in found) is not is_encrypted


def test_an_erased_tenant_has_nothing_left_anywhere(tmp_path: Path) -> None:
    """In memory, on the disk, after a restart; then it begins anew."""
    settings = settings_in(tmp_path)
    with Served(settings) as served:
        served.put(NAMES[:16])
        served.push_out()
        served.put(NAMES[16:])
        assert served.num_found(NAMES[:16]) == 16
        answer = served.erase()
        assert (answer.num_blocks, answer.had_key) == (24, True)
        assert served.num_found() == served.num_found(NAMES[16:]) == 0
        assert served.client.get(served.namespace, NAMES[16:]).num_blocks == 0
        assert served.tiers_with_bytes() == set()
        assert served.admin.CheckIntegrity(pb.CheckIntegrityRequest(), timeout=TIMEOUT_S).problems == []
        again = served.erase()
        assert (again.num_blocks, again.had_key) == (0, False)
    with Served(settings) as served:
        assert served.num_found(NAMES[:16]) == 0
        data = served.put(NAMES)
        served.push_out()
    with Served(settings) as served:
        np.testing.assert_array_equal(served.client.get(served.namespace, NAMES).data, data)


def test_a_block_that_is_being_read_stays_until_it_was(tmp_path: Path) -> None:
    """A lease keeps the memory, and nobody else finds what is in it."""
    with Served(settings_in(tmp_path)) as served:
        data = served.put(NAMES[:4])
        with served.client.acquire(served.namespace, NAMES[:4]) as lease:
            served.erase()
            assert served.num_found(NAMES[:4]) == 0
            status = served.admin.GetStatus(pb.GetStatusRequest(), timeout=TIMEOUT_S)
            assert sum(tier.condemned_bytes for tier in status.tiers) == data.nbytes
            assert lease is not None
        status = served.admin.GetStatus(pb.GetStatusRequest(), timeout=TIMEOUT_S)
        assert sum(tier.condemned_bytes for tier in status.tiers) == 0


@pytest.mark.parametrize(("code", "reason"), [(errno.EROFS, "DISK_FAILED"), (errno.ENOSPC, "TIER_FULL")])
def test_a_disk_that_takes_no_key_file_is_named(
    tmp_path: Path, code: int, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(path: Path, data: bytes) -> None:
        raise OSError(code, os.strerror(code))

    with Served(settings_in(tmp_path)) as served:
        served.put(NAMES[:4])
        served.push_out()
        monkeypatch.setattr(keyring, "write_whole", fails)
        with pytest.raises(grpc.RpcError) as refused:
            served.erase()
        assert reason_of(refused) == reason
        assert f"nothing is erased: {'io_error' if code == errno.EROFS else 'no_space'}: {tmp_path}" in str(
            refused.value
        )
        assert served.num_found(NAMES[:4]) == 4


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("nobody", "NOTHING_THERE"),
        ("red", "BAD_REQUEST"),
        ("", "BAD_REQUEST"),
        ("tenant:acme/eu", "BAD_REQUEST"),
    ],
)
def test_what_cannot_be_erased_is_said(tmp_path: Path, name: str, reason: str) -> None:
    red = {"members": ["uid:4321"], "sharing": "group:colours"}
    tenants = {"acme": {"members": [f"uid:{os.getuid()}"]}, "red": red}
    with Served(settings_in(tmp_path, tenants=tenants)) as served:
        served.put(NAMES[:2])
        with pytest.raises(grpc.RpcError) as refused:
            served.erase(name)
        assert reason_of(refused) == reason
        assert served.num_found(NAMES[:2]) == 2
        if name == "red":
            assert "kvtier tenant erase group:colours" in str(refused.value)


def test_nothing_is_erased_that_is_not_encrypted(tmp_path: Path) -> None:
    with Served(settings_in(tmp_path, is_encrypted=False)) as served:
        served.put(NAMES[:2])
        with pytest.raises(grpc.RpcError) as refused:
            served.erase()
        assert reason_of(refused) == "NOT_ENCRYPTED"
        assert served.num_found(NAMES[:2]) == 2


def test_who_there_is(tmp_path: Path) -> None:
    tenants = {
        "acme": {"members": [f"uid:{os.getuid()}"], "bandwidth_share": 3},
        "bolt": {"members": ["uid:4321"]},
    }
    with Served(settings_in(tmp_path, tenants=tenants)) as served:
        data = served.put(NAMES)
        served.push_out()
        rows = {row.name: row for row in served.admin.ListTenants(pb.ListTenantsRequest()).tenants}
        assert rows.keys() == {"tenant:acme", "tenant:bolt"}
        acme, bolt = rows["tenant:acme"], rows["tenant:bolt"]
        assert (acme.bandwidth_share, bolt.bandwidth_share) == (3.0, 1.0)
        assert (acme.has_key, bolt.has_key) == (True, False)
        assert acme.nvme_bytes == data.nbytes
        assert acme.copied_bytes["dram>nvme"] == data.nbytes
        assert not bolt.copied_bytes


def test_a_daemon_without_tenants_has_a_common_one(tmp_path: Path) -> None:
    with Served(settings_in(tmp_path, tenants={})) as served:
        served.put(NAMES[:4])
        served.push_out()
        (row,) = served.admin.ListTenants(pb.ListTenantsRequest()).tenants
        assert (row.name, row.has_key) == (COMMON, True)
        assert served.erase(COMMON).num_blocks == 4
        assert served.num_found(NAMES[:4]) == 0


def test_a_master_key_that_others_can_read_keeps_the_daemon_from_starting(tmp_path: Path) -> None:
    settings = settings_in(tmp_path)
    (tmp_path / "master.key").chmod(0o644)
    with pytest.raises(StartError, match="chmod 600"), DaemonThread(settings):
        pass
