"""Hosts that encrypt and share an object store: what others can read, and what erasing leaves."""

import hashlib
import importlib.util
import os
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from kvtier.appliance.config import Settings
from kvtier.appliance.errors import StartError
from kvtier.appliance.preflight.facts import FleetKeysTrial, gather_fleet_keys
from kvtier.sources.objects.fleet_keys import FleetKeys
from kvtier.sources.objects.keys import tenant_folder
from kvtier.sources.objects.store import ObjectStore
from kvtier.tiers.encryption.master_keys import MasterKeys, key_id
from kvtier.v1 import admin_pb2 as pb

from ..waiting import until
from .test_erase import IDENTITY, NAMES, PLANTED, Served, reason_of, settings_in
from .test_key_rotation import by_watch, write

if importlib.util.find_spec("obstore") is None:
    pytest.skip("no object stores: `pip install obstore`", allow_module_level=True)

MASTER, OTHER = os.urandom(32), os.urandom(32)
OURS = replace(IDENTITY, domain="tenant:acme")  # as the daemon has it
STORED = NAMES[:16]  # a bundle; the rest is none


def settings(folder: Path, host: str, master: bytes = MASTER, *, nvme: bool = True) -> Settings:
    """Return those of one host of a fleet, whose store is a folder."""
    (folder / host).mkdir(exist_ok=True)
    (folder / "store").mkdir(exist_ok=True)
    write(folder / host, master)
    shared = {"url": f"file://{folder / 'store'}", "share": "eager"}
    found = settings_in(folder / host, object=shared)
    return (
        found if nvme else found.model_copy(update={"tiers": found.tiers.model_copy(update={"nvme": None})})
    )


def bundles(folder: Path) -> list[Path]:
    return sorted(path for path in (folder / "store").glob("v1/b/*/*/*/*") if "#" not in path.name)


def wraps(folder: Path) -> list[Path]:
    return sorted((folder / "store").glob("v1/k/*/*"))


def open_source(served: Served) -> Any:
    """Wait until a host uses the store; return what does."""
    source = served.running.daemon.source
    assert source is not None
    until(lambda: source.status().is_open)
    return source


def stored(served: Served, folder: Path) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Put blocks, and wait for their bundle; return their bytes."""
    open_source(served)
    data = served.put(NAMES)
    until(lambda: len(bundles(folder)) == 1)
    return data


def read(served: Served) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Get the blocks, as soon as the store has brought them."""
    found: Any = None

    def has_come() -> bool:
        nonlocal found
        found = served.client.get(served.namespace, NAMES)
        return bool(found.num_blocks)

    until(has_come)
    assert found.num_blocks == len(STORED)
    return np.asarray(found.data)


def test_hosts_with_one_master_key_share_and_the_bucket_tells_no_prompt(tmp_path: Path) -> None:
    with Served(settings(tmp_path, "one")) as one:
        data = stored(one, tmp_path)
    with Served(settings(tmp_path, "two")) as two:
        open_source(two)
        np.testing.assert_array_equal(read(two), data[: len(data) * 2 // 3])
    paths = [path for path in (tmp_path / "store").rglob("*") if path.is_file()]
    everything = b"".join(str(path).encode() + path.read_bytes() for path in paths)
    assert len(bundles(tmp_path)) == len(wraps(tmp_path)) == 1
    for secret in (PLANTED, b"acme", OURS.digest, *NAMES):
        assert secret not in everything
        assert secret.hex().encode() not in everything
    assert tenant_folder("tenant:acme").encode() in everything, "so that erasing needs no key"


def test_no_bundle_tells_namespace_name_or_parent(tmp_path: Path) -> None:
    """The head of the second bundle of a chain names the namespace, its blocks and the block before them."""
    names = [hashlib.sha256(b"chain %d" % number).digest() for number in range(2 * len(STORED))]
    with Served(settings(tmp_path, "one")) as one:
        open_source(one)
        one.put(names)
        until(lambda: len(bundles(tmp_path)) == 2)
    for bundle in bundles(tmp_path):
        told = str(bundle).encode() + bundle.read_bytes()
        for secret in (OURS.digest, *names):
            assert secret not in told
            assert secret.hex().encode() not in told


def test_a_host_with_another_master_key_does_not_start_and_harms_nothing(tmp_path: Path) -> None:
    with Served(settings(tmp_path, "one")) as one:
        stored(one, tmp_path)
    before = {path: path.read_bytes() for path in (*wraps(tmp_path), *bundles(tmp_path))}
    with pytest.raises(StartError) as refused, Served(settings(tmp_path, "two", OTHER)):
        pass
    assert "another master key" in str(refused.value)
    assert key_id(MASTER) in str(refused.value)
    assert key_id(OTHER) in str(refused.value)
    assert "encryption.master_key" in str(refused.value)
    assert {path: path.read_bytes() for path in (*wraps(tmp_path), *bundles(tmp_path))} == before


@pytest.mark.parametrize("nvme", [True, False])
def test_erasing_a_tenant_on_one_host_erases_it_in_the_store(tmp_path: Path, nvme: bool) -> None:
    with (
        Served(settings(tmp_path, "one", nvme=nvme)) as one,
        Served(settings(tmp_path, "two", nvme=nvme)) as two,
    ):
        stored(one, tmp_path)
        keys = open_source(two).keys
        [bundle] = bundles(tmp_path)
        kept = bundle.read_bytes()
        keys.refresh(0)
        assert keys.names("tenant:acme") is not None
        one.erase()
        assert bundles(tmp_path) == []
        assert [path.name for path in wraps(tmp_path)] == ["00000001"], "the mark"
        bundle.parent.mkdir(parents=True)
        bundle.write_bytes(kept)  # a copy that its thief puts back
        keys.refresh(0)
        assert keys.names("tenant:acme") is None
        assert two.client.get(two.namespace, NAMES).num_blocks == 0
        two.put(NAMES)
        until(
            lambda: len(wraps(tmp_path)) == len(bundles(tmp_path)) == 2
        )  # under a key and a name of its own


def test_a_store_that_is_gone_keeps_no_host_from_erasing(tmp_path: Path) -> None:
    with Served(settings(tmp_path, "one")) as one:
        stored(one, tmp_path)
        (tmp_path / "store").rename(tmp_path / "away")
        (tmp_path / "store").write_text("a file in its place")
        with pytest.raises(grpc.RpcError) as refused:
            one.erase()
        assert reason_of(refused) == "SOURCE_FAILED"
        assert f"kvtier objects erase-tenant file://{tmp_path / 'store'} tenant:acme" in str(refused.value)
        assert one.num_found() == 0
        assert not one.admin.ListTenants(pb.ListTenantsRequest()).tenants[0].has_key


@pytest.mark.parametrize("nvme", [True, False])
def test_another_master_key_wraps_what_the_store_has(tmp_path: Path, nvme: bool) -> None:
    with Served(settings(tmp_path, "one", nvme=nvme)) as one:
        data = stored(one, tmp_path)
        write(tmp_path / "one", OTHER, MASTER)
        by_watch(one)
        until(lambda: [path.name for path in wraps(tmp_path)] == ["00000001"])
        rotation = one.running.daemon.rotation
        assert rotation is not None
        until(lambda: key_id(OTHER) in [use.id for use in rotation.uses() if use.num_wrapped])
        write(tmp_path / "one", MASTER)
        by_watch(one)
        until(lambda: "another master key" in rotation.last_error)
        write(tmp_path / "one", OTHER)
        by_watch(one)
        until(lambda: not rotation.last_error)
    with Served(settings(tmp_path, "two", OTHER)) as two:
        open_source(two)
        np.testing.assert_array_equal(read(two), data[: len(data) * 2 // 3])


def test_the_doctor_counts_keys_of_another_master_key(tmp_path: Path) -> None:
    found = settings(tmp_path, "one")
    store = ObjectStore(found.object.url)
    ours, others = FleetKeys(MasterKeys(MASTER)), FleetKeys(MasterKeys(OTHER))
    ours.open(store)
    others.open(store)
    others.key_for_writing("tenant:stranger")
    assert "another master key" in gather_fleet_keys(found).problem, "none opens"
    ours.key_for_writing("tenant:acme")
    assert gather_fleet_keys(found) == FleetKeysTrial("", 1)


def test_a_start_waits_for_no_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that takes connections and never answers says nothing about its keys."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        found = settings(tmp_path, "one")
        with_s3 = found.model_copy(
            update={"object": found.object.model_copy(update={"url": "s3://kv/fleet"})}
        )
        assert not gather_fleet_keys(with_s3).problem
        with Served(with_s3) as served:
            data = served.put(NAMES)
            np.testing.assert_array_equal(served.client.get(served.namespace, NAMES).data, data)
