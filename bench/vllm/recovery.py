"""How long an engine suffers when its appliance is killed, and when hits come back.

Prompts are drawn from a pool that the engine's own cache cannot hold, so that nearly all hits are the
appliance's. While they run it gets kill -9 (or SIGSTOP, which is worse: connections stay open and nobody
answers). From then on the engine has to compute, and the question is when it does so at the rate of an
engine that never had an appliance.
"""

from __future__ import annotations

import itertools
import random
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.table import render
from bench.vllm.appliance import Appliance
from bench.vllm.measure import sampling, seconds
from bench.vllm.models import FIRST_TOKEN, VOCABULARY
from bench.vllm.options import EngineOptions, kvtier_connector
from bench.vllm.process import Answer, EngineProcess, outputs_of

TINY = EngineOptions(dtype="bfloat16", num_blocks=96, max_model_tokens=2048, max_requests=4)
POOL, PROMPT_TOKENS, NEW_TOKENS = 40, 1200, 8
WINDOW_S = 1.0
BEFORE_S, AFTER_S = 5.0, 15.0
BACK = 0.9  # of the no-cache rate counts as back


@dataclass(frozen=True)
class Blow:
    """One blow to the appliance under load. Rates in tokens of output per second."""

    kind: str
    rate_hits: float
    rate_alone: float  # of an engine without connector, same prompts
    back_s: float  # from the blow until the rate is back at BACK x alone, over WINDOW_S
    longest_gap_s: float  # between two tokens, after the blow
    num_failed: int
    hit_again_s: float  # from the appliance's return to the first hit


def _requests(chance: random.Random, pool: list[list[int]], num: int) -> list[dict[str, Any]]:
    return [{"tokens": chance.choice(pool), "num_new": NEW_TOKENS, "logprobs": False} for _ in range(num)]


def _rate(answer: Answer) -> float:
    wall_s: float = answer["wall_s"]
    return sum(int(num) for _, num in answer["steps"]) / wall_s


def time_until_back(steps: list[tuple[float, int]], blow_at_s: float, rate: float) -> float:
    """Return the earliest start, in seconds after the blow, of a window with `BACK` x `rate`."""
    after = [(at_s - blow_at_s, num) for at_s, num in steps if at_s >= blow_at_s]
    end_s = after[-1][0] if after else 0.0
    starts = [0.0, *(at_s for at_s, _ in after)]
    for start_s in starts:
        if start_s + WINDOW_S > end_s:
            break
        if sum(num for at_s, num in after if start_s <= at_s < start_s + WINDOW_S) >= BACK * rate * WINDOW_S:
            return start_s
    return float("inf")


def _strike(
    kind: str, engine: EngineProcess, appliance: Appliance, pool: list[list[int]], rate_alone: float
) -> Blow:
    chance = random.Random(13)
    with sampling(engine.pid, appliance.pid):
        return _measured(kind, engine, appliance, pool, rate_alone, chance)


def _measured(
    kind: str,
    engine: EngineProcess,
    appliance: Appliance,
    pool: list[list[int]],
    rate_alone: float,
    chance: random.Random,
) -> Blow:
    warm = engine.call("generate", requests=_requests(chance, pool, 4 * POOL), trace=True)
    rate_hits = _rate(warm)
    num = int((BEFORE_S * rate_hits + AFTER_S * rate_alone) / NEW_TOKENS)
    engine.send("generate", requests=_requests(chance, pool, num), trace=True)
    time.sleep(BEFORE_S)
    blow_at_s = time.monotonic()
    if kind == "kill -9":
        appliance.kill()
    else:
        appliance.freeze()
    answer = engine.receive()
    if kind == "kill -9":
        appliance.start()
    else:
        appliance.thaw()
    hit_again_s = _until_hit(engine, pool[0])
    steps = [(at_s, num) for at_s, num in answer["steps"]]
    times = [blow_at_s, *(at_s for at_s, _ in steps if at_s > blow_at_s)]
    gap_s = max((late - early for early, late in itertools.pairwise(times)), default=0.0)
    num_failed = sum(output.finish != "length" for output in outputs_of(answer))
    back_s = time_until_back(steps, blow_at_s, rate_alone)
    return Blow(kind, rate_hits, rate_alone, back_s, gap_s, num_failed, hit_again_s)


def _until_hit(engine: EngineProcess, tokens: list[int]) -> float:
    began_at_s = time.monotonic()
    while True:
        engine.reset()
        (output,) = engine.generate({"tokens": tokens, "num_new": 1, "logprobs": False})
        if output.num_cached:
            return output.first_at_s - began_at_s
        if time.monotonic() - began_at_s > 120.0:
            return float("inf")


def run(is_quick: bool) -> list[Blow]:
    chance = random.Random(12)
    pool = [[chance.randrange(FIRST_TOKEN, VOCABULARY) for _ in range(PROMPT_TOKENS)] for _ in range(POOL)]
    blows = []
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-") as name, Appliance() as appliance:
        folder = Path(name)
        with_kvtier = replace(TINY, connector=kvtier_connector(appliance.target))
        with (
            EngineProcess(TINY, folder, "plain") as plain,
            EngineProcess(with_kvtier, folder, "kvtier") as kvtier,
        ):
            for engine in (plain, kvtier):
                engine.generate(*_requests(chance, pool, 4))
            for kind in ["kill -9"] if is_quick else ["kill -9", "SIGSTOP"] * 2:
                with sampling(plain.pid):
                    alone = plain.call("generate", requests=_requests(chance, pool, 2 * POOL), trace=True)
                blows.append(_strike(kind, kvtier, appliance, pool, _rate(alone)))
    return blows


def report(blows: list[Blow]) -> str:
    rows = [
        [
            blow.kind,
            f"{blow.rate_hits:.0f}",
            f"{blow.rate_alone:.0f}",
            seconds(blow.back_s),
            seconds(blow.longest_gap_s),
            str(blow.num_failed),
            seconds(blow.hit_again_s),
        ]
        for blow in blows
    ]
    header = ["blow", "tokens/s hits", "without", "back after s", "longest gap s", "failed", "hits again s"]
    return render(header, rows)
