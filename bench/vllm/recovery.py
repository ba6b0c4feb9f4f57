"""Measures, under one load, how long an engine is slower after its appliance is killed, until hits return.

Prompts are drawn from a pool, and the engine's own prefix cache is off: every hit is the appliance's. While
they run it gets kill -9 (or SIGSTOP, which is worse: connections stay open without answers), and some
seconds later it comes back, the load going on. Between the two the engine has to compute, and the question
is when it does so at the rate of an engine that never had an appliance. Prompts of the model take
longer to compute than to load, so that the rates with and without hits are far apart.
"""

from __future__ import annotations

import itertools
import math
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.table import render
from bench.vllm.appliance import ApplianceProcess
from bench.vllm.measure import seconds
from bench.vllm.models import FIRST_TOKEN, VOCABULARY
from bench.vllm.options import kvtier_connector
from bench.vllm.priority import join_sample, sampling
from bench.vllm.process import Answer, EngineProcess, outputs_of
from bench.vllm.ttft import MID

ENGINE = replace(MID, max_model_tokens=2048, max_requests=4, prefix_caching=False)
POOL, PROMPT_TOKENS, NEW_TOKENS = 24, 640, 16
WINDOW_S, SLOT_S = 1.0, 0.5
BEFORE_S, GONE_S, AFTER_S = 5.0, 6.0, 6.0
BACK = 0.9  # of the no-cache rate counts as back
KINDS = ("kill -9", "SIGSTOP")


@dataclass(frozen=True)
class Blow:
    """One blow to the appliance under load. Rates in tokens of output per second."""

    kind: str
    rate_hits: float  # before the blow
    rate_alone: float  # of an engine without connector, same prompts
    back_s: float  # from the blow until the rate is back at BACK x alone, over WINDOW_S
    longest_gap_s: float  # between two tokens, from the blow to the return
    num_failed: int
    returned_s: float  # when the appliance was there again
    hit_again_s: float  # from the appliance's return to the first token of a request that was a hit
    series: list[float]  # rate in slots of SLOT_S, from BEFORE_S before the blow to the end


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


def series_of(steps: list[tuple[float, int]], blow_at_s: float) -> list[float]:
    """Return tokens per second in slots of SLOT_S, the first one BEFORE_S before the blow."""
    first_at_s = blow_at_s - BEFORE_S
    end_s = steps[-1][0] if steps else first_at_s
    rates = [0.0] * math.floor((end_s - first_at_s) / SLOT_S)
    for at_s, num in steps:
        slot = math.floor((at_s - first_at_s) / SLOT_S)
        if 0 <= slot < len(rates):
            rates[slot] += num / SLOT_S
    return rates


def _strike(
    kind: str, engine: EngineProcess, appliance: ApplianceProcess, pool: list[list[int]], rate_alone: float
) -> Blow:
    """Run one load from before the kill until well after the appliance's return."""
    chance = random.Random(13)
    blow, comes_back = _ways(kind, appliance)
    warm = engine.call("generate", requests=_requests(chance, pool, 2 * POOL), trace=True)
    num_tokens = (BEFORE_S + GONE_S) * _rate(warm)  # without hits, this takes long enough for a slow start
    engine.send("generate", requests=_requests(chance, pool, int(num_tokens / NEW_TOKENS)), trace=True)
    time.sleep(BEFORE_S)
    blow_at_s = time.monotonic()
    blow()
    time.sleep(GONE_S)
    comes_back()
    back_at_s = time.monotonic()
    answers = [engine.receive()]  # how long a start takes is not known: what shows the return begins after it
    num_more = int(AFTER_S * _rate(warm) / NEW_TOKENS)
    answers.append(engine.call("generate", requests=_requests(chance, pool, num_more), trace=True))
    outputs = [output for answer in answers for output in outputs_of(answer)]
    steps = [(at_s, num) for answer in answers for at_s, num in answer["steps"]]
    before = [num for at_s, num in steps if blow_at_s - BEFORE_S <= at_s < blow_at_s]
    times = [blow_at_s, *(at_s for at_s, _ in steps if blow_at_s < at_s < back_at_s)]
    hits = [output.first_at_s for output in outputs if output.num_cached]
    return Blow(
        kind=kind,
        rate_hits=sum(before) / BEFORE_S,
        rate_alone=rate_alone,
        back_s=time_until_back([one for one in steps if one[0] < back_at_s], blow_at_s, rate_alone),
        longest_gap_s=max((late - early for early, late in itertools.pairwise(times)), default=0.0),
        num_failed=sum(output.finish != "length" for output in outputs),
        returned_s=back_at_s - blow_at_s,
        hit_again_s=min((at_s - back_at_s for at_s in hits if at_s > back_at_s), default=float("inf")),
        series=series_of(steps, blow_at_s),
    )


def _ways(kind: str, appliance: ApplianceProcess) -> tuple[Callable[[], object], Callable[[], object]]:
    def start() -> None:
        appliance.launch()
        join_sample(appliance.session)  # else the engine, which has precedence, would leave it no processor
        appliance.wait_until_it_serves()

    if kind == "kill -9":
        return appliance.kill, start
    return appliance.freeze, appliance.thaw


def run(is_quick: bool) -> list[Blow]:
    chance = random.Random(12)
    pool = [[chance.randrange(FIRST_TOKEN, VOCABULARY) for _ in range(PROMPT_TOKENS)] for _ in range(POOL)]
    blows = []
    with (
        tempfile.TemporaryDirectory(prefix="kvtier-bench-") as name,
        ApplianceProcess(dram="1GiB") as appliance,
    ):
        folder = Path(name)
        with_kvtier = replace(ENGINE, connector=kvtier_connector(appliance.target))
        with (
            EngineProcess(ENGINE, folder, "plain") as plain,
            EngineProcess(with_kvtier, folder, "kvtier") as kvtier,
        ):
            plain.generate(*_requests(chance, pool, 4))
            for kind in KINDS[:1] if is_quick else KINDS * 2:
                kvtier.generate(*_all(pool))  # all of it is stored
                with sampling(plain.pid, kvtier.pid, appliance.session):
                    alone = plain.call("generate", requests=_requests(chance, pool, POOL), trace=True)
                    blows.append(_strike(kind, kvtier, appliance, pool, _rate(alone)))
    return blows


def _all(pool: list[list[int]]) -> list[dict[str, Any]]:
    return [{"tokens": tokens, "num_new": 1, "logprobs": False} for tokens in pool]


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
    return "\n\n".join([render(header, rows), *(_series_text(blow) for blow in blows)])


def _series_text(blow: Blow) -> str:
    """Return the timeline, one number per slot, a new line at the kill and at the return."""
    cuts = [0, round(BEFORE_S / SLOT_S), round((BEFORE_S + blow.returned_s) / SLOT_S), len(blow.series)]
    parts = [blow.series[start:end] for start, end in itertools.pairwise(cuts)]
    labels = [f"{blow.kind}: before", "without it", "it is back"]
    return "\n".join(
        f"{label:16} {' '.join(f'{rate:3.0f}' for rate in part)}"
        for label, part in zip(labels, parts, strict=True)
    )
