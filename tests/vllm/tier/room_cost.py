"""`python -m tests.vllm.tier.room_cost`: what waiting for room in vLLM's pool is worth.

Users with prompts stored in kvtier come back at once, through a pool of host memory that holds one
prompt and a bit. Two engines that differ in `wait_for_room_s` only, in turns; 0 computes what finds no
room, as vLLM does below any other tier.
"""

import os
import statistics
import tempfile
import time
from pathlib import Path

from bench.vllm.appliance import ApplianceProcess
from bench.vllm.options import EngineOptions
from bench.vllm.process import EngineProcess

from .test_engine import BLOCK_TOKENS, prompts, tier_connector, whole_blocks

USERS, TOKENS, ROUNDS = 6, 3000, 3
POOL_BLOCKS = TOKENS // BLOCK_TOKENS * 5 // 4


def main() -> None:
    asked = prompts(USERS, 1, TOKENS, TOKENS + 1)
    for one in asked:
        one["num_new"] = 1
    with ApplianceProcess() as appliance, tempfile.TemporaryDirectory() as folder:
        engines: dict[float, EngineProcess] = {}
        for wait_s in (0.0, 5.0):
            connector = tier_connector(
                appliance.target, POOL_BLOCKS, wait_for_room_s=wait_s, max_waiting_fraction=1.0
            )
            connector["kv_connector_extra_config"]["cpu_bytes_to_use"] = POOL_BLOCKS * mid_block_bytes()
            options = EngineOptions(
                model="mid", dtype="bfloat16", block_tokens=BLOCK_TOKENS, num_blocks=1024, connector=connector
            )
            engines[wait_s] = EngineProcess(options, Path(folder), f"wait-{wait_s:g}")
        for engine in engines.values():
            engine.ready()
        for one in asked:  # stored by one engine; its pool is too small for two at once
            engines[5.0].reset()
            began_s = time.monotonic()
            engines[5.0].generate(one)
            print(f"computed in {time.monotonic() - began_s:.2f} s")
        results: dict[float, list[tuple[float, float]]] = {wait_s: [] for wait_s in engines}
        for _ in range(ROUNDS):
            for wait_s, engine in engines.items():
                engine.reset()
                began_s = time.monotonic()
                got = engine.generate(*asked)
                took_s = time.monotonic() - began_s
                cached = sum(one.num_cached for one in got) / sum(whole_blocks(one) for one in asked)
                results[wait_s].append((took_s, cached))
        for wait_s, rounds in results.items():
            seconds, shares = zip(*rounds, strict=True)
            print(
                f"wait_for_room_s {wait_s:g}: {USERS} users x {TOKENS} tokens answered in "
                f"{statistics.median(seconds):.2f} s ({min(seconds):.2f} to {max(seconds):.2f}), "
                f"{statistics.median(shares):.0%} of the tokens found"
            )
        print(f"load {os.getloadavg()[0]:.1f}")
        for engine in engines.values():
            engine.stop()


def mid_block_bytes() -> int:
    """Return the bytes of a block of the model `mid` in bfloat16."""
    import json

    from bench.vllm import models

    config = json.loads((models.path_of("mid") / "config.json").read_text())
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return 2 * 2 * BLOCK_TOKENS * int(config["num_hidden_layers"] * config["num_key_value_heads"] * head_dim)


if __name__ == "__main__":
    main()
