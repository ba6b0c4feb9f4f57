"""Time to the first token of a prompt that is stored, by the road on which its KV comes back.

All engines live at the same time and take turns within a round, so that a busy minute hits them alike; each
first answers something short, because the first answer after a pause is slow in all of them. Prompts are
asked for again after the engine has forgotten them (`reset_prefix_cache`), which leaves each road its own
store: the appliance's DRAM; its NVMe tier (the appliance is restarted before each round, direct I/O);
vLLM's own tiered offload, with its primary pool in memory, and with its `fs` tier alone (the engine is
restarted).

A virtual disk gives bursts after a rest. So from disk both stores are restarted first, and then take turns
prompt by prompt, each after the same rest: half a minute apart, as they were before, the store with the
longer restart found the disk rested.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from bench.table import ratio, render
from bench.vllm.appliance import ApplianceProcess
from bench.vllm.measure import seconds
from bench.vllm.models import FIRST_TOKEN, VOCABULARY
from bench.vllm.options import Connector, EngineOptions, kvtier_connector
from bench.vllm.priority import sampling
from bench.vllm.process import EngineProcess, Output
from tests.waiting import until

RECOMPUTE, DRAM, NVME, TIER, TIER_FS = "recompute", "kvtier dram", "kvtier nvme", "vllm tier", "vllm fs tier"
SIZES = (2048, 4096, 8192)
STORES = ("memory", "disk")
MID = EngineOptions(
    model="mid",
    dtype="bfloat16",
    block_tokens=128,
    max_model_tokens=8448,
    max_batch_tokens=2048,
    num_blocks=160,
)
RECOMPUTE_EVERY = 5  # rounds: it takes seconds
REST_S = 2.0  # of the disk, before each prompt
NUM_IN_MEMORY, NUM_ON_DISK = 15, 6  # rounds


@dataclass(frozen=True)
class TtftSample:
    road: str
    num_tokens: int
    ttft_s: float
    num_cached: int


def tier_connector(folder: Path) -> Connector:
    """Return vLLM's own offload with its file tier. Its workers are for CUDA and XPU; ours is for the CPU."""
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "CpuTieringSpec",
            "spec_module_path": "tests.vllm.tier.cpu_worker",
            "cpu_bytes_to_use": 1 << 30,
            "secondary_tiers": [{"type": "fs", "root_dir": str(folder)}],
        },
    }


def prompts(sizes: Sequence[int], seed: int = 7) -> dict[int, list[int]]:
    chance = random.Random(seed)
    return {size: [chance.randrange(FIRST_TOKEN, VOCABULARY) for _ in range(size)] for size in sizes}


def ask(engine: EngineProcess, tokens: list[int]) -> Output:
    return engine.generate({"tokens": tokens, "num_new": 4, "logprobs": False})[0]


def warm_up(engine: EngineProcess) -> None:
    """Run less than a block, of which nothing is stored: kernels are chosen and threads started."""
    for _ in range(3):
        ask(engine, [FIRST_TOKEN] * (MID.block_tokens - 8))


def again(engine: EngineProcess, road: str, tokens: list[int], *others: int) -> TtftSample:
    """Ask for a prompt that the engine itself has forgotten; `others` are the store's processes."""
    engine.reset()
    with sampling(engine.pid, *others):
        warm_up(engine)
        output = ask(engine, tokens)
    return TtftSample(road, len(tokens), output.ttft_s, output.num_cached)


@dataclass
class EngineRig:
    """`plain` is there where something is computed anew."""

    plain: EngineProcess | None
    kvtier: EngineProcess
    tier: EngineProcess
    appliance: ApplianceProcess
    folder: Path
    asked: dict[int, list[int]]

    def prime(self) -> None:
        """Run every prompt once on every engine, which stores it in its own store."""
        warm_up(self.kvtier)
        self.appliance.wait_for_codecs()  # sessions that end are archived at once, as they are until then
        for engine in (self.plain, self.kvtier, self.tier):
            if engine is not None:
                warm_up(engine)
                for tokens in self.asked.values():
                    ask(engine, tokens)
                engine.reset()

    def round_in_memory(self, number: int) -> Iterator[TtftSample]:
        """Measure both stores in turns, the other first every second time; sometimes without any."""
        for tokens in self.asked.values():
            if self.plain is not None and number % RECOMPUTE_EVERY == 0:
                yield again(self.plain, RECOMPUTE, tokens)
            for road in (DRAM, TIER) if number % 2 else (TIER, DRAM):
                yield self._again(road, tokens)

    def round_on_disk(self, number: int) -> Iterator[TtftSample]:
        """Measure both stores in turns after both lost what they had in memory."""
        self.tier.stop()
        self.tier = EngineProcess(self.tier.options, self.folder, f"tier-{number}")
        warm_up(self.tier)
        self.appliance.leave_dram()
        self.appliance.wait_for_codecs()
        self._reconnect()
        for tokens in self.asked.values():
            for road in (NVME, TIER_FS) if number % 2 else (TIER_FS, NVME):
                time.sleep(REST_S)
                yield self._again(road, tokens)

    def _again(self, road: str, tokens: list[int]) -> TtftSample:
        if road in (DRAM, NVME):
            return again(self.kvtier, road, tokens, self.appliance.session)
        return again(self.tier, road, tokens)

    def _reconnect(self) -> None:
        """Wait until the connector has noticed a new appliance: a small stored prompt then hits."""
        small = prompts([2 * MID.block_tokens], seed=8)[2 * MID.block_tokens]
        until(lambda: again(self.kvtier, "", small).num_cached, "no hit since the appliance was restarted")


@contextmanager
def rig(sizes: Sequence[int], has_plain: bool) -> Iterator[EngineRig]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvtier-bench-")))
        appliance = stack.enter_context(ApplianceProcess(dram="1GiB"))
        connectors: dict[str, Connector | None] = {
            "plain": None,
            "kvtier": kvtier_connector(appliance.target),
            "tier": tier_connector(folder / "fs"),
        }
        engines = {
            name: stack.enter_context(EngineProcess(replace(MID, connector=connector), folder, name))
            for name, connector in connectors.items()
            if connector or has_plain
        }
        plain = engines.pop("plain", None)
        running = EngineRig(plain, **engines, appliance=appliance, folder=folder, asked=prompts(sizes))
        stack.callback(lambda: running.tier.kill())  # the last one of several
        yield running


def run(is_quick: bool, num_rounds: int = 0, stores: Sequence[str] = STORES) -> list[TtftSample]:
    """Measure hits from these stores; `num_rounds` 0 is as many as usual. Raises EngineDied or TimeoutError
    when a store does not work."""
    sizes = SIZES[:1] if is_quick else SIZES
    num_in_memory, num_on_disk = (num_rounds or usual for usual in (NUM_IN_MEMORY, NUM_ON_DISK))
    if is_quick:
        num_in_memory, num_on_disk = 3, 1
    samples: list[TtftSample] = []
    with rig(sizes, has_plain="memory" in stores) as running:
        running.prime()
        for number in range(num_in_memory if "memory" in stores else 0):
            samples += list(running.round_in_memory(number))
        for number in range(num_on_disk if "disk" in stores else 0):
            samples += list(running.round_on_disk(number))
    return samples


def report(samples: list[TtftSample]) -> str:
    """Return one row per size and path; ratios are of medians."""
    rows = []
    for size in sorted({sample.num_tokens for sample in samples}):
        by_road = {
            road: [one for one in samples if one.road == road and one.num_tokens == size]
            for road in (RECOMPUTE, DRAM, TIER, NVME, TIER_FS)
        }
        by_road = {road: many for road, many in by_road.items() if many}
        medians = {road: statistics.median(one.ttft_s for one in many) for road, many in by_road.items()}
        for road, many in by_road.items():
            peer = {DRAM: TIER, NVME: TIER_FS}.get(road)
            rows.append(
                [
                    str(size),
                    road,
                    seconds(medians[road]),
                    seconds(min(one.ttft_s for one in many)),
                    seconds(max(one.ttft_s for one in many)),
                    str(min(one.num_cached for one in many)),
                    ratio(medians[RECOMPUTE] / medians[road]) if RECOMPUTE in medians else "",
                    ratio(medians[peer] / medians[road]) if peer else "",
                    str(len(many)),
                ]
            )
        rows.append([])
    header = ["tokens", "road", "p50 s", "best", "worst", "cached", "of recompute", "of vllm's tier", "calls"]
    return render(header, rows[:-1])
