"""A runtime in a process of its own, with paged KV tensors on a GPU: the other side of bench.pages.

    python -m bench.pages_runtime TARGET cuda|fake BLOCKS LAYERS LAYERS_PER_GROUP

Answers lines of stdin with lines of JSON: `put`, `get ROUNDS`, `layers`, `torch ROUNDS`, `archive`, `quit`.
Pages are vLLM's (one tensor a layer, K and V of a head side by side); what is put lies in the first half of
them and is fetched into the second one, in pages of no order, and compared there byte for byte.
"""

import hashlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import numpy as np

from kvtier.clients import Client, Geometry, NamespaceIdentity
from kvtier.clients.options import Timeout
from tests.e2e.direct_device import FakeExporter

HEADS, DIM, TOKENS = 8, 128, 16
SESSION = "bench"
CALL_S = 60.0


class Torch:
    """Tensors on CUDA, and what is done with them. Never ran on a GPU."""

    def __init__(self) -> None:
        import torch

        from kvtier.clients.direct_cuda import CudaExporter

        self._torch = torch
        self.exporter = CudaExporter(0)
        self._layers: list[Any] = []
        self._pinned: list[Any] = []

    def tensors(self, num_layers: int, num_pages: int) -> Sequence[Any]:
        """Return one tensor a layer, [page, head, token, K and V], tokens before heads in memory."""
        torch = self._torch
        shape = (num_pages, TOKENS, HEADS, 2 * DIM)
        self._layers = [torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for _ in range(num_layers)]
        return [layer.permute(0, 2, 1, 3) for layer in self._layers]

    def fill(self, num_blocks: int) -> None:
        """Put values like KV into the first pages, and zeros into the others."""
        torch = self._torch
        generator = torch.Generator(device="cuda").manual_seed(1)
        for layer in self._layers:
            layer.zero_()
            layer[:num_blocks].normal_(generator=generator)
        torch.cuda.synchronize()

    def is_same(self, ids: Sequence[int]) -> bool:
        """Return whether pages `ids` hold what the first ones do."""
        torch = self._torch
        where = torch.tensor(list(ids), device="cuda")
        pairs = (
            (layer[: len(ids)].view(torch.int16), layer[where].view(torch.int16)) for layer in self._layers
        )
        return all(bool(torch.equal(first, second)) for first, second in pairs)

    def wait(self, event: Any) -> None:
        """Wait until an event of the daemon has happened."""
        event.synchronize()

    def copy_s(self, num_blocks: int) -> float:
        """Return the seconds in which as many bytes, pinned, are copied into the pages by this process alone,
        one contiguous copy a layer."""
        torch = self._torch
        if not self._pinned:
            self._pinned = [layer[:num_blocks].cpu().pin_memory() for layer in self._layers]
        torch.cuda.synchronize()
        began_at = time.perf_counter()
        for layer, pinned in zip(self._layers, self._pinned, strict=True):
            layer[num_blocks : 2 * num_blocks].copy_(pinned, non_blocking=True)
        torch.cuda.synchronize()
        return time.perf_counter() - began_at


class Fake:
    """The same on the fake device, to see that everything runs."""

    def __init__(self) -> None:
        from tests.fakes.gpu.device import FakeDevice

        self._device = FakeDevice(capacity_bytes=1 << 30, is_live=True, seed=2)
        self.exporter = FakeExporter(self._device)
        self._whole: Any = None

    def tensors(self, num_layers: int, num_pages: int) -> Sequence[Any]:
        shape = (num_layers, num_pages, TOKENS, HEADS, 2 * DIM)
        self._whole = self.exporter.tensor(int(np.prod(shape)) * 2).view(np.uint16).reshape(shape)
        return [layer.swapaxes(1, 2) for layer in self._whole]

    def fill(self, num_blocks: int) -> None:
        values = np.random.default_rng(1).standard_normal(self._whole[:, :num_blocks].shape, np.float32)
        self._whole[:] = 0
        self._whole[:, :num_blocks] = (values.view(np.uint32) >> 16).astype(np.uint16)

    def is_same(self, ids: Sequence[int]) -> bool:
        return bool((self._whole[:, : len(ids)] == self._whole[:, list(ids)]).all())

    def wait(self, event: Any) -> None:
        while not event.is_done():
            time.sleep(1e-4)

    def copy_s(self, num_blocks: int) -> float:
        source = self._whole[:, :num_blocks].copy()
        began_at = time.perf_counter()
        self._whole[:, num_blocks : 2 * num_blocks] = source
        return time.perf_counter() - began_at


class PageRuntime:
    """One registration and one chain."""

    def __init__(
        self, target: str, kit: Torch | Fake, num_blocks: int, num_layers: int, layers_per_group: int
    ) -> None:
        self.kit, self.num_blocks = kit, num_blocks
        # In page order: what two runtimes of one kind share fastest (docs/direct.md).
        geometry = Geometry(num_layers, HEADS, DIM, TOKENS, "bfloat16", "page order", layers_per_group)
        self.client = Client(target, name="bench", timeout=Timeout(call_s=CALL_S))
        name = hashlib.sha256(b"bench.pages").digest()
        self.namespace = self.client.register(NamespaceIdentity(name, geometry))
        self.pages = self.client.register_pages(
            self.namespace, "vllm", kit.tensors(num_layers, 2 * num_blocks), kit.exporter, num_event_sets=1
        )
        self.chain = [hashlib.sha256(b"block %d" % i).digest() for i in range(num_blocks)]
        order = np.random.default_rng(2).permutation(num_blocks)
        self.ids = [int(page) for page in num_blocks + order]
        kit.fill(num_blocks)

    def put(self) -> dict[str, Any]:
        """Store the chain from the first pages."""
        began_at = time.perf_counter()
        first = list(range(self.num_blocks))
        report = self.pages.put(self.namespace, self.chain, first, session=SESSION)
        return {"num_stored": report.num_stored, "seconds": time.perf_counter() - began_at}

    def get(self, rounds: int) -> dict[str, Any]:
        """Get the chain `rounds` times, all layers at once; compare the last."""
        seconds = []
        cpu_began_at = time.process_time()
        for _ in range(rounds):
            began_at = time.perf_counter()
            report = self.pages.get(self.namespace, self.chain, self.ids, load_anyway=True)
            seconds.append(time.perf_counter() - began_at)
        cpu_s = time.process_time() - cpu_began_at
        is_same = report.num_loaded == self.num_blocks and self.kit.is_same(self.ids)
        return {"num_loaded": report.num_loaded, "is_same": is_same, "seconds": seconds, "cpu_s": cpu_s}

    def layers(self) -> dict[str, Any]:
        """Get the chain once, layer group after layer group; return when each had arrived."""
        seconds = []
        began_at = time.perf_counter()
        with self.pages.begin_get(self.namespace, self.chain, self.ids, load_anyway=True) as delivery:
            for group in delivery:
                self.kit.wait(group.event)
                seconds.append(time.perf_counter() - began_at)
            report = delivery.wait()
        is_same = report.num_loaded == self.num_blocks and self.kit.is_same(self.ids)
        return {"num_loaded": report.num_loaded, "is_same": is_same, "seconds": seconds}

    def archive(self) -> dict[str, Any]:
        """Let the chain's session end: its blocks go to the cold store."""
        self.client.session(SESSION).end(archive=True)
        return {}

    def torch(self, rounds: int) -> dict[str, Any]:
        """Copy as many bytes with this process's own means."""
        seconds = [self.kit.copy_s(self.num_blocks) for _ in range(rounds + 1)][1:]
        return {"seconds": seconds, "median_s": median(seconds)}


def main(target: str, kind: str, num_blocks: str, num_layers: str, layers_per_group: str) -> None:
    kit = Torch() if kind == "cuda" else Fake()
    runtime = PageRuntime(target, kit, int(num_blocks), int(num_layers), int(layers_per_group))
    commands: dict[str, Callable[..., dict[str, Any]]] = {
        "put": runtime.put,
        "get": runtime.get,
        "layers": runtime.layers,
        "archive": runtime.archive,
        "torch": runtime.torch,
    }
    print(json.dumps({"device": kit.exporter.device_uuid}), flush=True)
    for line in sys.stdin:
        word, *numbers = line.split()
        if word == "quit":
            break
        print(json.dumps(commands[word](*map(int, numbers))), flush=True)
    runtime.pages.unregister()
    runtime.client.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
