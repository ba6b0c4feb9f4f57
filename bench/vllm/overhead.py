"""What the connector costs when nothing is ever found: throughput with it and without it.

Two engines take turns, and swap who is first; each pair of neighbours gives one ratio, and the median of
them is the answer. Wall time on a shared machine moves by more than the bar; the CPU seconds of engine and
appliance together say how much work was added.
"""

from __future__ import annotations

import random
import statistics
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.table import render
from bench.vllm.appliance import Appliance
from bench.vllm.measure import cpu_s, sampling
from bench.vllm.models import FIRST_TOKEN, VOCABULARY
from bench.vllm.options import kvtier_connector
from bench.vllm.process import EngineProcess
from bench.vllm.ttft import MID, warm_up

PROMPT_TOKENS, NEW_TOKENS, NUM_REQUESTS = 400, 48, 8


@dataclass(frozen=True)
class Pair:
    """Seconds of one round: wall and CPU, without the connector and with it."""

    plain_s: float
    kvtier_s: float
    plain_cpu_s: float
    kvtier_cpu_s: float


def workload(chance: random.Random) -> list[dict[str, Any]]:
    return [
        {
            "tokens": [chance.randrange(FIRST_TOKEN, VOCABULARY) for _ in range(PROMPT_TOKENS)],
            "num_new": NEW_TOKENS,
            "logprobs": False,
        }
        for _ in range(NUM_REQUESTS)
    ]


def _timed(engine: EngineProcess, others: list[int], asks: list[dict[str, Any]]) -> tuple[float, float]:
    before_s = sum(cpu_s(one) for one in (engine.pid, *others))
    with sampling(engine.pid, *others):
        wall_s = engine.call("generate", requests=asks)["wall_s"]
    return wall_s, sum(cpu_s(one) for one in (engine.pid, *others)) - before_s


def run(is_quick: bool) -> list[Pair]:
    num_rounds = 2 if is_quick else 6
    chance, pairs = random.Random(11), []
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-") as name, Appliance(dram="3GiB") as appliance:
        folder, options = Path(name), replace(MID, max_requests=4)
        with_kvtier = replace(options, connector=kvtier_connector(appliance.target))
        with (
            EngineProcess(options, folder, "plain") as plain,
            EngineProcess(with_kvtier, folder, "kvtier") as kvtier,
        ):
            for engine in (plain, kvtier):
                warm_up(engine)
                engine.call("generate", requests=workload(chance)[:4])
            for number in range(num_rounds):
                asks = workload(chance)
                taken = {}
                for engine in (plain, kvtier) if number % 2 else (kvtier, plain):
                    others = [appliance.pid] if engine is kvtier else []
                    taken[engine.name] = _timed(engine, others, asks)
                pairs.append(
                    Pair(taken["plain"][0], taken["kvtier"][0], taken["plain"][1], taken["kvtier"][1])
                )
    return pairs


def report(pairs: list[Pair]) -> str:
    num_tokens = NUM_REQUESTS * (PROMPT_TOKENS + NEW_TOKENS)
    rows = [
        [
            str(number + 1),
            f"{num_tokens / pair.plain_s:.0f}",
            f"{num_tokens / pair.kvtier_s:.0f}",
            f"{(pair.kvtier_s / pair.plain_s - 1) * 100:+.1f} %",
            f"{pair.plain_cpu_s:.2f}",
            f"{pair.kvtier_cpu_s:.2f}",
            f"{(pair.kvtier_cpu_s / pair.plain_cpu_s - 1) * 100:+.1f} %",
        ]
        for number, pair in enumerate(pairs)
    ]
    wall = statistics.median(pair.kvtier_s / pair.plain_s for pair in pairs) - 1
    work = statistics.median(pair.kvtier_cpu_s / pair.plain_cpu_s for pair in pairs) - 1
    rows += [[], ["median", "", "", f"{wall * 100:+.1f} %", "", "", f"{work * 100:+.1f} %"]]
    header = ["round", "tokens/s alone", "with kvtier", "time", "CPU s alone", "with kvtier", "work"]
    return render(header, rows)
