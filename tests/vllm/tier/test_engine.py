"""The tier with the real engine: stored by one process, found by the next, the appliance dying, and being
small.

vLLM's own prefix cache is emptied before every request that is to be a hit, and its primary pool holds
fewer blocks than the prompts have, so that what is found comes from kvtier. What an engine computes itself
is what is expected of a hit, in float32, up to the noise of other batch shapes
(tests/vllm/e2e/comparison.py).
"""

import os
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bench.vllm.appliance import ApplianceProcess
from bench.vllm.options import Connector, EngineOptions
from bench.vllm.process import EngineProcess, Output
from kvtier.v1 import types_pb2

from .. import patience
from ..e2e.comparison import difference

FULL = os.environ.get("FULL") == "1"
SEED = int(os.environ.get("SEED", "1"))
BLOCK_TOKENS = 32
BLOCK_BYTES = 128 << 10  # of the model `tiny` in float32
WAIT_S = 120.0
HITS = "vllm:kv_offload_tiering_chunk_hits{tier=1:KvtierTier}"
LOST = "vllm:kv_offload_kvtier_lost"


def tier_connector(target: str, num_pool_blocks: int, **settings: Any) -> Connector:
    """Return vLLM's offloading with kvtier below, as the docs have it but for the worker."""
    tier = {"type": "KvtierTier", "module_path": "kvtier.clients.vllm_tier", "target": target}
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "spec_name": "CpuTieringSpec",
            "spec_module_path": "tests.vllm.tier.cpu_worker",
            "cpu_bytes_to_use": num_pool_blocks * BLOCK_BYTES,
            "secondary_tiers": [{**tier, **patience.TIER, **settings}],
        },
    }


def options(target: str, num_pool_blocks: int = 40, model: str = "tiny", **settings: Any) -> EngineOptions:
    connector = tier_connector(target, num_pool_blocks, **settings)
    return EngineOptions(
        model=model, block_tokens=BLOCK_TOKENS, num_blocks=512, in_one_process=True, connector=connector
    )


def prompts(number: int, seed: int, min_tokens: int = 200, max_tokens: int = 900) -> list[dict[str, Any]]:
    chance = random.Random(seed)
    lengths = [chance.randrange(min_tokens, max_tokens) for _ in range(number)]
    lengths = [
        n + (n % BLOCK_TOKENS == 0) for n in lengths
    ]  # a full hit computes its last token anew, differently
    return [{"tokens": [chance.randrange(3, 512) for _ in range(n)], "num_new": 6} for n in lengths]


def alone(engine: EngineProcess, asked: Sequence[dict[str, Any]]) -> list[Output]:
    """Ask one by one, with an empty prefix cache each."""
    outputs = []
    for one in asked:
        engine.reset()
        outputs += engine.generate(one)
    return outputs


def compare(expected: Sequence[Output], got: Sequence[Output]) -> list[str]:
    pairs = zip(expected, got, strict=True)
    return [f"request {n}: {text}" for n, pair in enumerate(pairs) if (text := difference(*pair))]


def whole_blocks(asked: dict[str, Any]) -> int:
    """Tokens of a prompt that can be hits: its full blocks, but never its last token."""
    return (len(asked["tokens"]) - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def settle(engine: EngineProcess, appliance: ApplianceProcess, num_blocks: int) -> None:
    """Wait until so many blocks are stored: stores are off the critical path. A store that was dropped ends
    the wait, with its cause: it is not offered again."""
    deadline_s = time.monotonic() + WAIT_S
    while appliance.num_blocks() < num_blocks:
        engine.reset()  # an engine in one process polls its tiers only when it steps
        lost = {name: value for name, value in engine.metrics().items() if name.startswith(LOST) and value}
        arrived = f"{appliance.num_blocks()} of {num_blocks} blocks arrived"
        assert not lost, f"{arrived}, the others were dropped: {lost}"
        assert time.monotonic() < deadline_s, arrived


def store_alone(
    engine: EngineProcess, appliance: ApplianceProcess, asked: Sequence[dict[str, Any]]
) -> list[Output]:
    """Ask one by one, each when the blocks of those before it are stored: a tier drops stores when the ones
    that wait hold too much of the primary pool, and on a slow machine they would."""
    outputs, num_blocks = [], 0
    for one in asked:
        outputs += alone(engine, [one])
        num_blocks += len(one["tokens"]) // BLOCK_TOKENS
        settle(engine, appliance, num_blocks)
    return outputs


def test_stored_found_by_another_process_and_an_appliance_that_dies(tmp_path: Path) -> None:
    asked = prompts(5, SEED)
    num_blocks = sum(len(one["tokens"]) // BLOCK_TOKENS for one in asked)
    with ApplianceProcess() as appliance:
        chosen = options(appliance.target, max_waiting_fraction=1.0)  # a prompt's stores may all wait
        with EngineProcess(chosen, tmp_path, "first") as first:
            expected = store_alone(first, appliance, asked)
            assert [one.num_cached for one in expected] == [0] * 5
            first.stop()
        with EngineProcess(chosen, tmp_path, "second") as second:
            got = alone(second, asked)
            assert [one.num_cached for one in got] == [whole_blocks(one) for one in asked]
            assert compare(expected, got) == []
            assert second.metrics()[HITS] >= num_blocks - 5

            second.send("generate", requests=asked * 4)  # under load ...
            appliance.kill()
            assert {one["finish"] for one in second.receive()["requests"]} == {"length"}
            assert compare(expected, alone(second, asked)) == []  # ... and without anybody there

            appliance.start()  # with what its cold store has
            deadline_s = time.monotonic() + WAIT_S
            num_hits = second.metrics()[HITS]
            while second.metrics()[HITS] == num_hits:  # the pool is too small for all of them
                assert compare(expected, alone(second, asked)) == []
                assert time.monotonic() < deadline_s, "no hits after the appliance came back"
            second.stop()
        appliance.check_integrity()


def test_a_small_appliance_evicts_and_never_holds_more(tmp_path: Path) -> None:
    capacity_blocks = 128
    settings = ("tiers.dram.capacity=16MiB",)
    with ApplianceProcess(dram="16MiB", nvme="", settings=settings) as appliance:
        with EngineProcess(options(appliance.target), tmp_path) as engine:
            asked = prompts(20, SEED + 3)
            num_blocks = sum(len(one["tokens"]) // BLOCK_TOKENS for one in asked)
            assert num_blocks > 2 * capacity_blocks
            expected = []
            for one in asked:
                expected += alone(engine, [one])
                assert appliance.used_bytes(types_pb2.TIER_DRAM) <= 16 << 20
            assert 0 < appliance.num_blocks() <= capacity_blocks
            again = alone(engine, asked[::-1])[::-1]
            assert compare(expected, again) == []
            assert engine.metrics()[HITS] > 0
            assert appliance.used_bytes(types_pb2.TIER_DRAM) <= 16 << 20
            engine.stop()
        appliance.check_integrity()


@pytest.mark.skipif(not FULL, reason="FULL=1 runs it: two more engines")
def test_a_hybrid_model_and_its_windows(tmp_path: Path) -> None:
    asked = prompts(4, SEED + 4, 300, 700)
    with ApplianceProcess() as appliance:
        chosen = options(appliance.target, num_pool_blocks=400, model="hybrid")
        with EngineProcess(chosen, tmp_path, "first") as first:
            expected = alone(first, asked)
            settle(first, appliance, 1)
            first.stop()
        with EngineProcess(chosen, tmp_path, "second") as second:
            got = alone(second, asked)
            assert compare(expected, got) == []
            assert min(one.num_cached for one in got) > 0
            second.stop()
        appliance.check_integrity()
