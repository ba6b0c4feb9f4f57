"""`python -m bench.vllm.versions 0.28.0 0.31.0`: versions of vLLM side by side, in one run.

An engine of each version, and of this environment's, all on one daemon and behind a switch (switch.py), take
turns: the first token of a stored prompt, from kvtier and from the engine's own cache, and the workload of
overhead.py, in which nothing is found. What one costs is compared with its own engine without kvtier,
and that with this environment's. `--add FILE` keeps the samples of a run there, and reports those of earlier
ones with them: a run of a few minutes is too short for an interval. Environments are those of
`make VERSION=... .venv-vllm-.../.ready`.
"""

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from bench.machine import ROOT
from bench.table import render
from bench.vllm.appliance import ApplianceProcess
from bench.vllm.options import kvtier_connector
from bench.vllm.overhead import Arm, interval, measured, switched, turn, workload
from bench.vllm.priority import sampling, use_priority
from bench.vllm.process import EngineProcess
from bench.vllm.ttft import MID, ask, prompts, warm_up

HERE = "this one"
KINDS = ("found", "own", "time", "work")  # seconds, seconds, ratio, ratio
Samples = dict[str, dict[str, list[float]]]  # version -> kind -> values


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("versions", nargs="+", metavar="VERSION")
    parser.add_argument("--firsts", type=int, default=8, help="rounds of first tokens")
    parser.add_argument("--rounds", type=int, default=2, help="of the workload, half a minute a version")
    parser.add_argument("--tokens", type=int, default=4096, help="of the stored prompt")
    parser.add_argument("--niceness", type=int, help="as of `python -m bench.vllm`")
    parser.add_argument("--add", type=Path, metavar="FILE", help="of samples of earlier runs")
    given = parser.parse_args()
    use_priority(given.niceness)
    pythons = {version: str(ROOT / f".venv-vllm-{version}/bin/python") for version in given.versions}
    pythons[HERE] = sys.executable
    samples = run(pythons, given)
    runs: list[Samples] = json.loads(given.add.read_text()) if given.add and given.add.exists() else []
    runs.append(samples)
    if given.add:
        given.add.write_text(json.dumps(runs))
    print(
        f"{given.tokens + 1} tokens; {len(runs)} runs; load {os.getloadavg()[0]:.1f} at the end of the last"
    )
    print(report(runs, list(pythons)))


def run(pythons: dict[str, str], given: argparse.Namespace) -> Samples:
    """Return the samples of one life of all engines."""
    samples: Samples = {version: {kind: [] for kind in KINDS} for version in pythons}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvtier-bench-")))
        appliance = stack.enter_context(ApplianceProcess(dram="3GiB"))
        engines, turned = {}, {}
        for version, python in pythons.items():
            options = replace(MID, max_requests=4, environment={"PYTHONHASHSEED": "0"})
            switch = folder / f"switch-{version}"
            switch.write_bytes(b"\1")
            turned[version] = partial(turn, switch)
            chosen = switched(options, kvtier_connector(appliance.target), switch)
            engines[version] = stack.enter_context(EngineProcess(chosen, folder, version, python))
        prompt = {}
        for number, (version, engine) in enumerate(engines.items()):
            warm_up(engine)
            # One more than whole blocks: an engine finds as much in its own cache as in kvtier.
            prompt[version] = prompts([given.tokens + 1], seed=number)[given.tokens + 1]
            ask(engine, prompt[version])
        appliance.wait_for_memory()
        for number in range(given.firsts):
            for version in sorted(engines, reverse=bool(number % 2)):
                engine = engines[version]
                engine.reset()
                with sampling(engine.pid, appliance.session):
                    for kind in ("found", "own"):
                        turned[version](kind == "found")
                        warm_up(engine)
                        output = ask(engine, prompt[version])
                        assert output.num_cached == given.tokens, f"{version} found {output.num_cached}"
                        samples[version][kind].append(output.ttft_s)
                turned[version](True)
        chance = random.Random(1)
        for number in range(given.rounds):
            for version in sorted(engines, reverse=bool(number % 2)):
                engine = engines[version]
                off = Arm("alone", engine, partial(turned[version], False))
                on = Arm("other", engine, partial(turned[version], True))
                order = (off, on, on, off) if number % 2 else (on, off, off, on)
                with sampling(engine.pid, appliance.session):
                    engine.call("generate", requests=workload(chance)[:8])  # it stood still for a minute
                    one = measured(order, appliance, chance)
                samples[version]["time"].append(one.time_ratio)
                samples[version]["work"].append(one.work_ratio)
                print(f"{version}: {one.time_ratio:.3f} {one.work_ratio:.3f}", file=sys.stderr, flush=True)
    return samples


def report(runs: list[Samples], versions: list[str]) -> str:
    """Return a table of the first tokens, and one of the workload.

    An engine is quicker or slower than another that was started alike for as long as it lives. So each run,
    one life of every engine, gives one ratio of medians; told are the median of these and its interval."""
    first, workload_rows = [], []
    for version in versions:
        ratios = [_found(one, version) / _found(one, HERE) for one in runs]
        by_own = [
            ratio * _own(one, HERE) / _own(one, version) for ratio, one in zip(ratios, runs, strict=True)
        ]
        first.append(
            [
                version,
                f"{1000 * statistics.median(_own(one, version) for one in runs):.1f}",
                f"{1000 * statistics.median(_found(one, version) for one in runs):.1f}",
                *(f"{value - 1:+.1%}" for value in (*interval(ratios), *interval(by_own))),
                " ".join(f"{ratio - 1:+.0%}" for ratio in ratios),
            ]
        )
        if rounds := [ratio for one in runs for ratio in one[version]["time"]]:
            works = [ratio for one in runs for ratio in one[version]["work"]]
            bounds = [*interval(rounds), *interval(works)]
            workload_rows.append([version, *(f"{value - 1:+.1%}" for value in bounds), str(len(rounds))])
    bounds_of = ["95 % from", "to"]
    heads = ["vLLM", "own ms", "found ms", "to this one", *bounds_of, "by its own", *bounds_of, "of each run"]
    ends = ["vLLM", "more time", *bounds_of, "more CPU", *bounds_of, "rounds"]
    return render(heads, first) + "\n\n" + render(ends, workload_rows)


def _found(samples: Samples, version: str) -> float:
    return statistics.median(samples[version]["found"])


def _own(samples: Samples, version: str) -> float:
    return statistics.median(samples[version]["own"])


if __name__ == "__main__":
    main()
