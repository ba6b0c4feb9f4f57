"""A host with a processor that reorders stores and loads, such as aarch64: native code, or leases."""

import hashlib
from pathlib import Path

import numpy as np
import pytest

from kvtier.clients import Client, Geometry, NamespaceIdentity
from kvtier.clients.memory import one_sided
from kvtier.native import native
from kvtier.tiers.memory import headers, index, residence

from ..appliance.conftest import small_settings
from ..appliance.loops import DaemonThread

GEOMETRY = Geometry(num_layers=2, num_kv_heads=4, head_dim=128, block_tokens=16, dtype="bfloat16")
IDENTITY = NamespaceIdentity(hashlib.sha256(b"unordered").digest(), GEOMETRY)
NAMES = [hashlib.sha256(b"%d" % number).digest() for number in range(6)]


@pytest.mark.parametrize("has_native", [True, False])
def test_blocks_are_read_by_native_code_or_under_a_lease(
    has_native: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if native is None and has_native:
        pytest.skip("native/ was not built, or KVTIER_NATIVE is off")
    num_orders = 0

    def order() -> None:
        nonlocal num_orders
        num_orders += 1

    monkeypatch.setattr(one_sided, "MEMORY_IS_ORDERED", False)
    monkeypatch.setattr(index, "MEMORY_IS_ORDERED", False)
    for module in (headers, index, residence):
        monkeypatch.setattr(module, "order_stores", order)
        if not has_native:
            monkeypatch.setattr(module, "native", None)
    if not has_native:
        monkeypatch.setattr(one_sided, "native", None)
    settings = small_settings(tmp_path)
    with DaemonThread(settings), Client(settings.listen[0]) as client:
        namespace = client.register(IDENTITY)
        data = np.random.default_rng(1).integers(0, 256, 6 * namespace.block_bytes, np.uint8)
        client.put(namespace, NAMES, data)
        pieces = list(np.zeros_like(data).reshape(6, -1))
        for _ in range(2):  # the first one maps the extents
            got = client.get(namespace, NAMES)
            assert np.array_equal(got.data, data)
            assert got.num_one_sided == (6 if has_native else 0)
            got = client.get(namespace, NAMES, into=pieces)
            assert np.array_equal(np.concatenate(pieces), data)
            assert got.num_one_sided == 0  # what numpy reads of headers is in no order
        one = np.zeros(namespace.block_bytes, np.uint8)
        assert client.get(namespace, NAMES[:1], into=one).num_one_sided == has_native
        assert np.array_equal(one, data[: namespace.block_bytes])
        assert client.lookup(namespace, NAMES).num_blocks == 6
    assert num_orders or has_native  # headers and entries of runs are written in C
