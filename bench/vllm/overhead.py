"""What the connector costs when nothing is ever found: throughput with it and without it.

Two sides take turns, A B B A and then B A A B; each such round gives one ratio, and the median of them, with
a bootstrap interval, is the answer. What the sides are:

    switch   one engine, kvtier switched on and off in it (switch.py)
    nothing  one engine, kvtier switched off on both sides: what of the line above is the method's own noise
    kvtier   two engines, one of them without a connector
    itself   two engines without: the same of the line above

Engines that are started alike differ by several percent as long as they live, more than the bar, so `switch`
is the one to go by. CPU seconds of engine and appliance together say how much work was added. The appliance
has its memory in place before the first round: a daemon makes it once in its life.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any

from bench.table import render
from bench.vllm.appliance import ApplianceProcess
from bench.vllm.measure import CpuClock, Seconds, total_s
from bench.vllm.models import FIRST_TOKEN, VOCABULARY
from bench.vllm.options import SWITCH_VARIABLE, Connector, EngineOptions, kvtier_connector
from bench.vllm.priority import sampling
from bench.vllm.process import EngineProcess
from bench.vllm.ttft import MID, warm_up

PROMPT_TOKENS, NEW_TOKENS, NUM_REQUESTS = 400, 48, 20  # requests of one leg, a quarter of a round
NUM_ROUNDS, QUICK_ROUNDS = 8, 2
LEAST_SHOWN_S = 0.005  # of a thread, per leg


@dataclass(frozen=True)
class LegTimes:
    """What two legs of one engine took: wall time, and CPU time by thread, the appliance's with it."""

    wall_s: float
    cpu_s: Seconds


@dataclass(frozen=True)
class Round:
    """Two legs of an engine alone, and two of the one it is compared with."""

    alone: LegTimes
    other: LegTimes

    @property
    def time_ratio(self) -> float:
        return self.other.wall_s / self.alone.wall_s

    @property
    def work_ratio(self) -> float:
        return total_s(self.other.cpu_s) / total_s(self.alone.cpu_s)


class Against(StrEnum):
    """What an engine alone is compared with."""

    SWITCH = "switch"
    NOTHING = "nothing"
    KVTIER = "kvtier"
    ITSELF = "itself"


@dataclass(frozen=True)
class Plan:
    """`num_rounds` 0: as usual."""

    against: Against = Against.SWITCH
    num_rounds: int = 0


@dataclass(frozen=True)
class Arm:
    """An engine, and what makes it ready for a leg of this side."""

    name: str  # alone or other
    engine: EngineProcess
    prepare: Callable[[], None] = lambda: None


def workload(chance: random.Random) -> list[dict[str, Any]]:
    return [
        {
            "tokens": [chance.randrange(FIRST_TOKEN, VOCABULARY) for _ in range(PROMPT_TOKENS)],
            "num_new": NEW_TOKENS,
            "logprobs": False,
        }
        for _ in range(NUM_REQUESTS)
    ]


def run(is_quick: bool, plan: Plan = Plan()) -> list[Round]:
    """Measure all rounds. Raises EngineDied when an engine does not work."""
    chance, rounds = random.Random(11), []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvtier-bench-")))
        is_itself = plan.against is Against.ITSELF
        appliance = None if is_itself else stack.enter_context(ApplianceProcess(dram="3GiB"))
        alone, other = _arms(stack, folder, plan, appliance)
        sessions = {alone.engine.pid, other.engine.pid} | ({appliance.session} if appliance else set())
        for number in range(plan.num_rounds or (QUICK_ROUNDS if is_quick else NUM_ROUNDS)):
            order = (alone, other, other, alone) if number % 2 else (other, alone, alone, other)
            with sampling(*sessions):
                rounds.append(measured(order, appliance, chance))
            ratios = f"{rounds[-1].time_ratio:.3f} {rounds[-1].work_ratio:.3f}"
            print(f"round {number + 1}: {ratios}", file=sys.stderr, flush=True)  # it takes minutes
    return rounds


def _arms(stack: ExitStack, folder: Path, plan: Plan, appliance: ApplianceProcess | None) -> tuple[Arm, Arm]:
    """Start what is compared; return it when it has computed something."""
    options = replace(MID, max_requests=4)
    connector = kvtier_connector(appliance.target) if appliance else None

    def start(name: str, chosen: EngineOptions) -> EngineProcess:
        engine = stack.enter_context(EngineProcess(chosen, folder, name))
        warm_up(engine)
        engine.call("generate", requests=workload(random.Random(10))[:4])
        return engine

    if plan.against in (Against.SWITCH, Against.NOTHING):
        path = folder / "switch"
        path.write_bytes(b"\1")
        engine = start("engine", switched(options, connector, path))
        off, on = (partial(turn, path, is_on) for is_on in (False, plan.against is Against.SWITCH))
        arms = Arm("alone", engine, off), Arm("other", engine, on)
    else:
        both = start("alone", options), start("other", replace(options, connector=connector))
        arms = Arm("alone", both[0]), Arm("other", both[1])
    if appliance is not None:
        appliance.wait_for_memory()
    return arms


def turn(path: Path, is_on: bool) -> None:
    """Turn a switch. The file keeps its length: others have it mapped."""
    with path.open("r+b") as file:
        file.write(bytes([is_on]))


def switched(options: EngineOptions, connector: Connector | None, path: Path) -> EngineOptions:
    """Return options with the connector behind a switch, a file of one byte (see switch.py)."""
    behind = {
        **(connector or {}),
        "kv_connector": "SwitchedConnector",
        "kv_connector_module_path": "bench.vllm.switch",
    }
    environment = {**options.environment, SWITCH_VARIABLE: str(path)}
    return replace(options, connector=behind, environment=environment)


def measured(order: Sequence[Arm], appliance: ApplianceProcess | None, chance: random.Random) -> Round:
    """Two legs of each side, the second pair in the opposite order: what drifts evenly cancels. Every leg has
    prompts of its own."""
    walls = {"alone": 0.0, "other": 0.0}
    spent: dict[str, Seconds] = {"alone": {}, "other": {}}
    of_appliance = CpuClock(appliance.session, "appliance") if appliance else None
    for arm in order:
        arm.prepare()
        clock = CpuClock(arm.engine.pid)
        walls[arm.name] += arm.engine.call("generate", requests=workload(chance))["wall_s"]
        spent[arm.name] = _sum(spent[arm.name], clock.spent())
    if of_appliance is not None:  # also what it finished while the other side ran
        spent["other"] = _sum(spent["other"], of_appliance.spent())
    alone, other = (LegTimes(walls[name], spent[name]) for name in walls)
    return Round(alone, other)


def read(file: Path) -> list[Round]:
    """Return the rounds that an earlier run wrote with --json."""
    rounds = json.loads(file.read_text())["results"]["overhead"]
    return [Round(LegTimes(**one["alone"]), LegTimes(**one["other"])) for one in rounds]


def _sum(one: Seconds, other: Seconds) -> Seconds:
    return {name: one.get(name, 0.0) + other.get(name, 0.0) for name in {**one, **other}}


def interval(ratios: Sequence[float], num_draws: int = 10_000, seed: int = 1) -> tuple[float, float, float]:
    """Return the median, and the bounds that hold 95 % of the medians of as many rounds drawn from these
    (the percentile bootstrap of Efron, 1979)."""
    chance = random.Random(seed)
    medians = sorted(statistics.median(chance.choices(ratios, k=len(ratios))) for _ in range(num_draws))
    return statistics.median(ratios), medians[num_draws // 40], medians[num_draws - num_draws // 40 - 1]


def report(rounds: list[Round]) -> str:
    """Return one row per round, the interval, and the CPU time by thread."""
    num_tokens = 2 * NUM_REQUESTS * (PROMPT_TOKENS + NEW_TOKENS)
    rows = [
        [
            str(number + 1),
            f"{num_tokens / one.alone.wall_s:.0f}",
            f"{num_tokens / one.other.wall_s:.0f}",
            _percent(one.time_ratio),
            f"{total_s(one.alone.cpu_s):.1f}",
            f"{total_s(one.other.cpu_s):.1f}",
            _percent(one.work_ratio),
        ]
        for number, one in enumerate(rounds)
    ]
    wall = interval([one.time_ratio for one in rounds])
    work = interval([one.work_ratio for one in rounds])
    rows.append([])
    for label, which in (("median", 0), ("95 % from", 1), ("to", 2)):
        rows.append([label, "", "", _percent(wall[which]), "", "", _percent(work[which])])
    header = ["round", "tokens/s alone", "the other", "time", "CPU s alone", "the other", "work"]
    return render(header, rows) + "\n\n" + _by_thread(rounds)


def _by_thread(rounds: list[Round]) -> str:
    """Return the median CPU milliseconds of a leg, by thread."""
    names = sorted({name for one in rounds for name in (*one.alone.cpu_s, *one.other.cpu_s)})
    rows = []
    for name in names:
        alone_s, other_s = (
            statistics.median(getattr(one, side).cpu_s.get(name, 0.0) for one in rounds) / 2
            for side in ("alone", "other")
        )
        if max(alone_s, other_s) >= LEAST_SHOWN_S:
            rows.append([name, *(f"{value * 1000:.0f}" for value in (alone_s, other_s, other_s - alone_s))])
    return render(["thread, CPU ms of a leg", "alone", "the other", "more"], rows)


def _percent(ratio: float) -> str:
    return f"{(ratio - 1) * 100:+.1f} %"
