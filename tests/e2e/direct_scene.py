"""A daemon with a fake GPU, and runtimes with pages on one, for the tests of the direct path.

A device that is not live stands still until the test lets it go on (`pump`), so that "while it is copying" is
a state one can look at, not a moment one has to hit.
"""

import hashlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from kvtier.appliance.config import Settings
from kvtier.appliance.core.events import EvictRequested
from kvtier.clients import Client, Geometry, NamespaceIdentity
from kvtier.clients.options import Timeout
from kvtier.clients.sync import Pages
from kvtier.tiers.block import Tier
from kvtier.tiers.gpu.device.contract import CopyPieces, DeviceMemory, Stream
from tests.fakes.gpu.device import FakeDevice

from ..appliance.loops import DaemonThread
from ..waiting import until
from .direct_device import FakeExporter

T = TypeVar("T")

GEOMETRY = Geometry(4, 2, 16, 4, "bfloat16", layers_per_group=1)
IDENTITY = NamespaceIdentity(hashlib.sha256(b"direct").digest(), GEOMETRY)
NUM_PAGES = 32
WAIT_S = 60.0
NUM_STREAMS = 16  # the hot tier takes some


def names(label: str, number: int) -> list[bytes]:
    """A chain of prefix hashes."""
    return [hashlib.sha256(f"{label}/{i}".encode()).digest() for i in range(number)]


class Served:
    """A daemon whose GPU is `device`."""

    def __init__(
        self,
        folder: Path,
        *,
        nvme: bool = False,
        device: FakeDevice | None = None,
        peers: Sequence[FakeDevice] = (),
        tenants: Mapping[str, Any] | None = None,
    ) -> None:
        self.device = device or FakeDevice(is_live=True, num_streams=NUM_STREAMS, seed=1)
        dram = {"capacity": "8MiB", "extent": "2MiB"}
        tiers: dict[str, Any] = {"hbm": {"capacity": "8MiB"}, "dram": dram}
        if nvme:
            # Tests count bytes here and search for records by content, so nothing is copied until one asks.
            nvme_at = {"path": str(folder / "nvme"), "capacity": "32MiB", "segment": "1MiB"}
            tiers["nvme"] = {**nvme_at, "write": "spill"}
        settings = {
            "listen": [f"unix://{folder}/k.sock"],
            "tiers": tiers,
            "compression": {"codec": "identity"},
            "observe": {"http": "off"},
            "tenants": tenants or {},
        }
        self.peers = peers
        self.thread = DaemonThread(Settings.model_validate(settings), self.device, peers)

    @property
    def target(self) -> str:
        return self.thread.daemon.settings.listen[0]

    @property
    def daemon(self) -> Any:
        return self.thread.daemon

    def pump(self, holds: Callable[[], bool]) -> None:
        """Let the device go on, and wait, until something holds on the daemon's loop."""
        pause = threading.Event()
        deadline_at = time.monotonic() + WAIT_S
        while not self.thread.call(holds):
            assert time.monotonic() < deadline_at, "it never came to that"
            for device in (self.device, *self.peers):
                device.run()
            pause.wait(0.001)

    def until(self, holds: Callable[[], bool]) -> None:
        """Wait until something holds on the daemon's loop; the device stands still."""
        until(lambda: self.thread.call(holds))

    def let_finish(self, work: "Future[T]") -> T:
        """Let the device go on until a call has its answer; return it."""
        self.pump(work.done)
        return work.result()

    @property
    def has_copies(self) -> bool:
        """Whether a stream of the device has a copy to do, now or later."""
        return any(type(item).__name__ == "Copying" for s in self.device._streams for item in s.work)

    @property
    def waits_for_a_runtime(self) -> bool:
        """Whether a call waits for an event of a runtime."""
        return any(entry.event.is_foreign for entry in self.device._calls)

    def count(self, name: str) -> int:
        return int(self.thread.call(self.daemon.counters)[name])

    def num_leases(self) -> int:
        return int(self.daemon.planner.statistics()["num_leases"])

    def evict(self, *, at_rest: bool = True) -> int:
        """Once everything is `at_rest`, evict all that can go from dram; return how many blocks went."""

        async def run() -> int:
            if at_rest:
                await self.daemon.appliance.settled()
            answer = self.daemon.appliance.ask(lambda call: EvictRequested(call, Tier.DRAM, 0))
            result = await answer if isinstance(answer, Future) or hasattr(answer, "__await__") else answer
            if at_rest:
                await self.daemon.appliance.settled()
            return int(result.num_blocks)

        return self.thread.wait(run())

    def opened(self) -> int:
        """Allocations of runtimes that the daemon has mapped."""
        devices = (self.device, *self.peers)
        return sum(one.kind == "opened" for device in devices for one in device.memory.regions.values())

    def assert_at_rest(self) -> None:
        """Nothing is held, mapped, or under way; the books are right."""
        self.pump(lambda: not self.daemon.direct._registrations and not self.num_leases())
        self.pump(lambda: self.opened() == 0 and not self.daemon.planner.statistics()["num_copies_in_flight"])
        assert self.thread.call(self.daemon.check_integrity) == []

    def __enter__(self) -> "Served":
        self.thread.__enter__()
        loop = self.thread.call(threading.get_ident)
        for device in (*self.peers, self.device):
            device.no_calls_on = loop
        return self

    def __exit__(self, *raised: Any) -> None:
        self.thread.__exit__(*raised)
        assert all(peer._is_shut_down for peer in self.peers), "with the daemon"
        for device in (*self.peers, self.device):
            device.shut_down()
            if raised[0] is None:
                assert device.check_integrity() == []


class Runtime:
    """A runtime with paged tensors on a fake GPU, in vLLM's order: one view per layer, [page, head, token,
    C]."""

    def __init__(
        self, target: str, *, is_live: bool = True, call_s: float = WAIT_S, gpu: int = 0, **options: Any
    ) -> None:
        self.client = Client(target, name="runtime", timeout=Timeout(call_s, WAIT_S, grace_s=0.2))
        self.device = FakeDevice(gpu, is_live=is_live, seed=2, may_wait_abroad=True)
        self.exporter = FakeExporter(self.device)
        shape = (GEOMETRY.num_layers, NUM_PAGES, 4, 2, 32)  # NHD: token before head
        self.whole = self.exporter.tensor(int(np.prod(shape)) * 2).view(np.uint16).reshape(shape)
        self.tensors = [layer.swapaxes(1, 2) for layer in self.whole]
        self.namespace = self.client.register(IDENTITY)
        try:
            self.pages: Pages = self.client.register_pages(
                self.namespace, "vllm", self.tensors, self.exporter, **options
            )
        except BaseException:
            self.client.close()
            self.device.shut_down()
            raise
        self._caller = ThreadPoolExecutor(1)
        self._compute: Stream | None = None

    def fill(self, seed: int) -> None:
        """Put random bytes into all pages."""
        self.whole[:] = np.random.default_rng(seed).integers(0, 1 << 16, self.whole.shape, np.uint16)

    def read(self, ids: list[int]) -> bytes:
        """The bytes of pages, one after another."""
        return b"".join(self.whole[:, page].tobytes() for page in ids)

    def start(self, call: Callable[..., T], *arguments: Any, **named: Any) -> "Future[T]":
        """Make a call on a thread of its own."""
        return self._caller.submit(call, *arguments, **named)

    def kernel(self, seed: int, event: Any) -> None:
        """Enqueue what fills all pages with random bytes, and record `event` behind it. Nothing has run
        yet."""
        source: DeviceMemory = self.device.allocate(self.whole.nbytes)
        wanted = np.random.default_rng(seed).integers(0, 256, self.whole.nbytes, np.uint8)
        self.device.poke(source.address, wanted.tobytes())
        stream = self._compute = self._compute or self.device.take_stream()
        columns = ([source.address], [self.exporter.memories[0].address], [self.whole.nbytes])
        stream.copy(
            CopyPieces(*(np.array(column, kind) for column, kind in zip(columns, "QQq", strict=True)))
        )
        stream.record(event)

    def close(self) -> None:
        self.pages.unregister()
        self.client.close()
        self.device.shut_down()
        assert self.device.check_integrity() == []


@contextmanager
def runtime_at(target: str, **options: Any) -> Iterator[Runtime]:
    """A runtime that leaves well; see Runtime."""
    runtime = Runtime(target, **options)
    yield runtime
    runtime.close()
