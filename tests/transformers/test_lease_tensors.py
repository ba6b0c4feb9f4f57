"""Tensors and leases, with the real torch: copies are the caller's own, and what only points is found."""

import hashlib
import subprocess
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvtier.clients import Client, Geometry, Namespace, NamespaceIdentity, PreconditionFailed, prefix_hashes
from kvtier.testing import FakeAppliance
from kvtier.v1.types import DTYPE_BYTES

from ..appliance.conftest import small_settings
from ..appliance.loops import DaemonThread

torch = pytest.importorskip("torch", reason="torch is not installed; `make test-transformers` runs this")

GEOMETRY = Geometry(2, 2, 64, 16, "bfloat16", layers_per_group=1)


@pytest.fixture(params=["daemon", "fake"])
def client(request: pytest.FixtureRequest, tmp_path: Any) -> Iterator[Client]:
    if request.param == "fake":
        with FakeAppliance().client() as made:
            yield made
        return
    with DaemonThread(small_settings(tmp_path)) as served, Client(served.daemon.grpc.addresses[0]) as made:
        yield made


def stored(
    client: Client, geometry: Geometry = GEOMETRY
) -> tuple[Namespace, list[bytes], np.ndarray[Any, Any]]:
    """Store a block; return namespace, its names and bytes."""
    namespace = client.register(NamespaceIdentity(hashlib.sha256(b"lease").digest(), geometry))
    names = prefix_hashes(namespace, range(16))
    data = np.random.default_rng(1).integers(0, 256, namespace.block_bytes, np.uint8)
    assert client.put(namespace, names, data).complete
    return namespace, names, data


def test_a_tensor_is_the_callers_own(client: Client) -> None:
    namespace, names, data = stored(client)
    with client.acquire(namespace, names) as lease:
        tensors = [fragment.tensor() for fragment in lease]
        raw = lease.view(0, 0).nbytes
    assert [tensor.dtype for tensor in tensors] == [torch.bfloat16] * 2
    assert raw == tensors[0].numel() * 2
    whole = torch.cat([tensor.view(torch.uint8) for tensor in tensors])
    np.testing.assert_array_equal(whole.numpy(), data)


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_a_tensor_has_the_namespaces_type(dtype: str) -> None:
    with FakeAppliance().client() as client:
        namespace, names, _ = stored(client, Geometry(1, 2, 64, 16, dtype))
        with client.acquire(namespace, names) as lease:
            (fragment,) = lease
            assert fragment.tensor().dtype is getattr(torch, dtype)
            assert fragment.tensor(torch.uint8).numel() == namespace.block_bytes


def test_a_tensor_over_an_array_is_found(client: Client) -> None:
    namespace, names, _ = stored(client)
    lease = client.acquire(namespace, names)
    fragment = next(iter(lease))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of arrays that are read-only
        part = torch.from_numpy(np.frombuffer(fragment.view, np.uint8))[3:5]
    with pytest.raises(PreconditionFailed, match="VIEWS_IN_USE"):
        lease.release()
    assert part.numel() == 2


def test_a_tensor_of_frombuffer_is_warned_of_once_it_is_too_late(client: Client) -> None:
    """It looks like a variable that still names the view; that one is no mistake."""
    namespace, names, _ = stored(client)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with client.acquire(namespace, names) as lease:
            fragment = next(iter(lease))
            kept = torch.frombuffer(fragment.view, dtype=torch.uint8)
            warnings.simplefilter("error", RuntimeWarning)
            with pytest.raises(RuntimeWarning, match=r"torch.frombuffer .*fragment.tensor\(\)"):
                lease.release()
        del kept
        with client.acquire(namespace, names) as lease:
            lease.wait()
            kept = torch.frombuffer(lease.view(0, 0), dtype=torch.uint8)
            del kept


def test_a_tensor_that_is_read_nevertheless_takes_nothing_down(client: Client) -> None:
    """In a process of its own: a mapping that is gone would be its end."""
    namespace, names, _ = stored(client)
    if client.info.transport != "local":
        return
    target = client.operations.settings.target
    script = f"""
import gc, torch, warnings
warnings.simplefilter("ignore")
from kvtier.clients import Client, Geometry, NamespaceIdentity
with Client({target!r}) as client:
    namespace = client.register(NamespaceIdentity(
        {namespace.identity.model_digest!r}, Geometry(2, 2, 64, 16, "bfloat16", layers_per_group=1)))
    with client.acquire(namespace, {names!r}) as lease:
        assert lease.wait() == 1
        tensor = torch.frombuffer(lease.view(0, 0), dtype=torch.uint8)
del client, lease, namespace
gc.collect()
print("read", int(tensor.sum()))
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("read")
