"""What the connector costs when nothing is ever found: throughput with it and without it.

Two engines take turns, A B B A and then B A A B; each such round gives one ratio, and the median of them,
with a bootstrap interval, is the answer. Wall time on a shared machine moves by more than the bar; the CPU
seconds of engine and appliance together say how much work was added.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
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

PROMPT_TOKENS, NEW_TOKENS, NUM_REQUESTS = 400, 48, 20  # requests of one leg, a quarter of a round


@dataclass(frozen=True)
class Round:
    """Seconds of one round: wall and CPU, without the connector and with it, two legs each."""

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


def run(is_quick: bool) -> list[Round]:
    chance, rounds = random.Random(11), []
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
            for number in range(2 if is_quick else 8):
                order = (plain, kvtier, kvtier, plain) if number % 2 else (kvtier, plain, plain, kvtier)
                with sampling(plain.pid, kvtier.pid, appliance.pid):
                    rounds.append(_round(order, appliance, chance))
                print(f"round {number + 1}: {rounds[-1]}", file=sys.stderr, flush=True)  # it takes minutes
    return rounds


def _round(order: Sequence[EngineProcess], appliance: Appliance, chance: random.Random) -> Round:
    """Two legs of each engine, the second pair in the opposite order: what drifts evenly cancels."""
    legs = [workload(chance) for _ in range(2)]
    seen = {"plain": 0, "kvtier": 0}
    wall_s, cpu = dict.fromkeys(seen, 0.0), dict.fromkeys(seen, 0.0)
    appliance_s = cpu_s(appliance.pid)
    for engine in order:
        before_s = cpu_s(engine.pid)
        wall_s[engine.name] += engine.call("generate", requests=legs[seen[engine.name]])["wall_s"]
        cpu[engine.name] += cpu_s(engine.pid) - before_s
        seen[engine.name] += 1
    cpu["kvtier"] += cpu_s(appliance.pid) - appliance_s  # also what it finished while the other engine ran
    return Round(wall_s["plain"], wall_s["kvtier"], cpu["plain"], cpu["kvtier"])


def interval(ratios: Sequence[float], num_draws: int = 10_000, seed: int = 1) -> tuple[float, float, float]:
    """Return the median, and the bounds that hold 95 % of the medians of as many rounds drawn from these
    (the percentile bootstrap of Efron, 1979)."""
    chance = random.Random(seed)
    medians = sorted(statistics.median(chance.choices(ratios, k=len(ratios))) for _ in range(num_draws))
    return statistics.median(ratios), medians[num_draws // 40], medians[num_draws - num_draws // 40 - 1]


def report(rounds: list[Round]) -> str:
    num_tokens = 2 * NUM_REQUESTS * (PROMPT_TOKENS + NEW_TOKENS)
    rows = [
        [
            str(number + 1),
            f"{num_tokens / one.plain_s:.0f}",
            f"{num_tokens / one.kvtier_s:.0f}",
            f"{(one.kvtier_s / one.plain_s - 1) * 100:+.1f} %",
            f"{one.plain_cpu_s:.1f}",
            f"{one.kvtier_cpu_s:.1f}",
            f"{(one.kvtier_cpu_s / one.plain_cpu_s - 1) * 100:+.1f} %",
        ]
        for number, one in enumerate(rounds)
    ]
    wall = interval([one.kvtier_s / one.plain_s for one in rounds])
    work = interval([one.kvtier_cpu_s / one.plain_cpu_s for one in rounds])
    rows.append([])
    for label, which in (("median", 0), ("95 % from", 1), ("to", 2)):
        texts = [f"{(values[which] - 1) * 100:+.1f} %" for values in (wall, work)]
        rows.append([label, "", "", texts[0], "", "", texts[1]])
    header = ["round", "tokens/s alone", "with kvtier", "time", "CPU s alone", "with kvtier", "work"]
    return render(header, rows)
