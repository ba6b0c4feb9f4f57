"""`python -m bench.transformers`: time to the first token of `generate` with kvtier and without.

Per model and prompt length, rounds of three: plain generate, a hit on what is in memory, and a hit on what is
on NVMe only (the daemon restarted). A hit's time is that of `store.load` plus generate of one token; the
tokens are compared, and differences end the run. Also told: what `cache.save` costs after a prefill, and
what it costs to identify the model.

Prefill on a CPU is slow and a GPU's is not, so the ratios flatter kvtier: they are no claim about GPUs. Run
it where torch is: `make .venv/.ready-demo`.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import time
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: its threads spin otherwise
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import transformers

from bench.machine import describe
from bench.table import ratio, render
from examples.daemon import ExampleDaemon
from kvtier.clients import Client, Tier
from kvtier.clients.transformers import PrefixStore, TieredCache

MIB = 1 << 20
VOCABULARY_SIZE = 512
SHAPES = {  # the demo's, and the middle one of bench.vllm
    "demo": {
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    },
    "mid": {
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
    },
}
SETTINGS = ["tiers.dram.capacity=1GiB", "tiers.dram.extent=64MiB", "tiers.nvme.capacity=2GiB"]


def build(shape: str, dtype: str) -> Any:
    """Return a Llama of 12 layers with weights from a seed."""
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        num_hidden_layers=12,
        head_dim=64,
        max_position_embeddings=16384,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=None,
        **SHAPES[shape],
    )
    model = transformers.LlamaForCausalLM(config).to(getattr(torch, dtype)).eval()
    model.generation_config.eos_token_id = None
    return model


def first_token(model: Any, prompt: Any, cache: Any = None) -> int:
    """Return the first token of the answer."""
    given = {} if cache is None else {"past_key_values": cache}
    output = model.generate(prompt, max_new_tokens=1, do_sample=False, **given)
    return int(output[0, -1])


class Bench:
    """One model in one daemon."""

    def __init__(self, model: Any, daemon: ExampleDaemon, store: PrefixStore) -> None:
        self.model, self.daemon, self.store = model, daemon, store

    def plain(self, prompt: Any) -> tuple[float, int]:
        """Return seconds and token of plain generate."""
        began_at = time.perf_counter()
        token = first_token(self.model, prompt)
        return time.perf_counter() - began_at, token

    def hit(self, prompt: Any, tier: Tier) -> tuple[float, int, TieredCache]:
        """Return seconds, token and cache of generate over a loaded past. Raises RuntimeError on a miss."""
        began_at = time.perf_counter()
        cache = self.store.load(prompt)
        token = first_token(self.model, prompt, cache)
        took_s = time.perf_counter() - began_at
        if not cache.reuse.tokens_by_tier[tier]:
            raise RuntimeError(
                f"expected a hit in {tier.label}, got {cache.reuse}; {dict(self.store.counts)}"
            )
        return took_s, token, cache

    def fill(self, prompt: Any) -> float:
        """Store a prompt; return how long `save` took."""
        cache = self.store.load(prompt)
        first_token(self.model, prompt, cache)
        began_at = time.perf_counter()
        saved = cache.save()
        took_s = time.perf_counter() - began_at
        if saved.num_refused or saved.why_not:
            raise RuntimeError(f"not saved: {saved}")
        return took_s

    def restart(self) -> None:
        """Restart the daemon, so that blocks are on NVMe only."""
        self.daemon.stop(signal.SIGTERM)
        self.daemon.start()

    def row(self, num_tokens: int, num_rounds: int) -> list[str]:
        """Measure one prompt length; return a row of the table."""
        times: dict[str, list[float]] = {"plain": [], "dram": [], "nvme": [], "save": []}
        reused = 0
        for number in range(num_rounds):
            source = torch.Generator().manual_seed(1000 * num_tokens + number)
            prompt = torch.randint(3, VOCABULARY_SIZE, (1, num_tokens), generator=source)
            plain_s, expected = self.plain(prompt)
            save_s = self.fill(prompt)
            dram_s, warm, cache = self.hit(prompt, Tier.DRAM)
            self.restart()
            nvme_s, cold, _ = self.hit(prompt, Tier.NVME)
            if not expected == warm == cold:
                raise RuntimeError(f"tokens differ: {expected}, {warm} from dram, {cold} from nvme")
            reused = cache.reuse.num_tokens
            for name, took_s in zip(times, (plain_s, dram_s, nvme_s, save_s), strict=True):
                times[name].append(took_s)
        median = {name: statistics.median(some) for name, some in times.items()}
        past_bytes = reused // self.store.block_tokens * self.store.block_bytes
        return [
            f"{num_tokens:,}",
            f"{reused:,}",
            f"{past_bytes / MIB:.0f} MiB",
            *(f"{median[name]:.3f}" for name in ("plain", "dram", "nvme")),
            ratio(median["plain"] / median["dram"]),
            ratio(median["plain"] / median["nvme"]),
            f"{median['save']:.3f}",
        ]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.transformers", description=__doc__.split("\n")[0])
    parser.add_argument("--shapes", nargs="*", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--tokens", nargs="*", type=int, default=[512, 1024, 2048, 4096])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    args = parser.parse_args()
    torch.set_num_threads(min(2, os.cpu_count() or 1))
    machine = describe({"torch": torch.__version__, "transformers": transformers.__version__})
    machine["command"] = machine["command"].replace("-m bench", "-m bench.transformers")
    for label, value in machine.items():
        print(f"{label:<9} {value}")
    header = ["prompt", "reused", "KV", "plain s", "dram s", "nvme s", "plain/dram", "plain/nvme", "save s"]
    for shape in args.shapes:
        model = build(shape, args.dtype)
        with ExampleDaemon(SETTINGS) as daemon:
            daemon.start()
            began_at = time.perf_counter()
            with Client(daemon.target) as client, PrefixStore(model, client) as store:
                ready_s = time.perf_counter() - began_at
                weights = sum(weight.numel() * weight.element_size() for weight in model.parameters())
                bench = Bench(model, daemon, store)
                bench.plain(torch.arange(3, 259)[None])  # the first pass is always slower
                rows = [bench.row(num_tokens, args.rounds) for num_tokens in args.tokens]
        print(
            f"\n{shape}: 12 layers, {weights / MIB:.0f} MiB of {args.dtype} weights, read in {ready_s:.2f} s"
        )
        print(render(header, rows), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
