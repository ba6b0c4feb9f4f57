"""The direct path end to end: a daemon with a fake GPU, runtimes whose pages it fills and reads."""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtier.clients import Client, Geometry, NamespaceIdentity
from kvtier.clients.direct_handles import Pages
from kvtier.tiers.gpu.fake import FakeDevice

from ..appliance.conftest import small_settings
from ..appliance.loops import DaemonThread
from .direct_device import FakeExporter, direct_device

GEOMETRY = Geometry(4, 2, 16, 4, "bfloat16", layers_per_group=1)
IDENTITY = NamespaceIdentity(hashlib.sha256(b"direct").digest(), GEOMETRY)
NUM_PAGES = 32


def names(label: str, number: int) -> list[bytes]:
    return [hashlib.sha256(f"{label}/{i}".encode()).digest() for i in range(number)]


class Served:
    """A daemon whose GPU is `device`."""

    def __init__(self, folder: Path, *, nvme: bool = False, **options: Any) -> None:
        self.device = FakeDevice(**{"is_live": True, "num_streams": 8, "seed": 1} | options)
        self.thread = DaemonThread(small_settings(folder, nvme=nvme))

    @property
    def target(self) -> str:
        return self.thread.daemon.settings.listen[0]

    def __enter__(self) -> "Served":
        self.thread.__enter__()
        daemon = self.thread.daemon
        self.thread.call(lambda: daemon.serve_pages([direct_device(self.device, daemon.appliance.engines)]))
        return self

    def __exit__(self, *raised: Any) -> None:
        self.thread.__exit__(*raised)
        self.device.shut_down()
        if raised[0] is None:
            assert self.device.check_integrity() == []


class Runtime:
    """A runtime with paged tensors on a fake GPU, in vLLM's order: one view per layer, [page, head, token,
    C]."""

    def __init__(self, target: str, **options: Any) -> None:
        self.client = Client(target, name="runtime")
        self.device = FakeDevice(is_live=True, seed=2)
        self.exporter = FakeExporter(self.device)
        shape = (GEOMETRY.num_layers, NUM_PAGES, 4, 2, 32)  # NHD: token before head
        memory = self.exporter.tensor(int(np.prod(shape)) * 2)
        self.whole = memory.view(np.uint16).reshape(shape)
        self.tensors = [layer.swapaxes(1, 2) for layer in self.whole]
        self.namespace = self.client.register(IDENTITY)
        self.pages: Pages = self.client.register_pages(
            self.namespace, "vllm", self.tensors, self.exporter, **options
        )

    def fill(self, seed: int) -> None:
        self.whole[:] = np.random.default_rng(seed).integers(0, 1 << 16, self.whole.shape, np.uint16)

    def read(self, ids: list[int]) -> bytes:
        """The bytes of pages in an order of our own."""
        return b"".join(self.whole[:, page].tobytes() for page in ids)

    def close(self) -> None:
        self.pages.unregister()
        self.client.close()
        self.device.shut_down()
        assert self.device.check_integrity() == []


@contextmanager
def runtime_at(target: str, **options: Any) -> Iterator[Runtime]:
    runtime = Runtime(target, **options)
    yield runtime
    runtime.close()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with Served(tmp_path) as running:
        yield running


def test_what_is_put_from_pages_comes_back_into_other_pages(served: Served) -> None:
    with runtime_at(served.target) as one, runtime_at(served.target) as two:
        one.fill(1)
        rng = random.Random(1)
        ids, others = rng.sample(range(NUM_PAGES), 8), rng.sample(range(NUM_PAGES), 8)
        chain = names("a", 8)
        assert one.pages.put(one.namespace, chain, ids).num_stored == 8
        report = two.pages.get(
            two.namespace, [*chain, *names("b", 1)], [*others, 0 if 0 not in others else 1]
        )
        assert (report.num_blocks, report.num_loaded, report.num_stored) == (8, 8, 8)
        assert two.read(others) == one.read(ids)
        report = two.pages.get(two.namespace, chain, others[:3], first_block=5)
        assert report.num_loaded == 3
        assert two.read(others[:3]) == one.read(ids[5:])
    assert served.thread.call(served.thread.daemon.counters)["direct_get_blocks"] == 11
