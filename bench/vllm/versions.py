"""`python -m bench.vllm.versions 0.28.0 0.31.0`: versions of vLLM side by side, in one run.

An engine of each version, and of this environment's, all on one daemon and behind a switch (switch.py), take
turns: the first token of a stored prompt, and a workload in which nothing is found, with kvtier and without.
Environments are those of `make VERSION=... .venv-vllm-.../.ready`.
"""

import argparse
import os
import random
import statistics
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from bench.machine import ROOT
from bench.table import render
from bench.vllm.appliance import ApplianceProcess
from bench.vllm.options import kvtier_connector
from bench.vllm.overhead import NEW_TOKENS, PROMPT_TOKENS, switched, turn, workload
from bench.vllm.process import EngineProcess
from bench.vllm.ttft import MID, ask, prompts, warm_up

HERE = "this one"
NUM_REQUESTS = 8  # of a leg


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("versions", nargs="+", metavar="VERSION")
    parser.add_argument("--rounds", type=int, default=8, help="of first tokens")
    parser.add_argument("--legs", type=int, default=3, help="pairs of legs of the workload")
    parser.add_argument("--tokens", type=int, default=4096, help="of the stored prompt")
    given = parser.parse_args()
    pythons = {version: str(ROOT / f".venv-vllm-{version}/bin/python") for version in given.versions}
    pythons[HERE] = sys.executable
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvtier-bench-")))
        appliance = stack.enter_context(ApplianceProcess(dram="3GiB"))
        engines = {}
        for version, python in pythons.items():
            options = replace(MID, max_requests=4, environment={"PYTHONHASHSEED": "0"})
            switch = folder / f"switch-{version}"
            switch.write_bytes(b"\1")
            chosen = switched(options, kvtier_connector(appliance.target), switch)
            engines[version] = stack.enter_context(EngineProcess(chosen, folder, version, python))
        computed_s, stored = {}, {}
        for number, (version, engine) in enumerate(engines.items()):
            warm_up(engine)
            stored[version] = prompts([given.tokens], seed=number)[given.tokens]
            computed_s[version] = ask(engine, stored[version]).ttft_s
        appliance.wait_for_memory()
        found_s: dict[str, list[float]] = {version: [] for version in engines}
        for _ in range(given.rounds):
            for version, engine in engines.items():
                engine.reset()
                warm_up(engine)
                output = ask(engine, stored[version])
                assert output.num_cached > 0, f"{version} found nothing"
                found_s[version].append(output.ttft_s)
        ratios: dict[str, list[float]] = {version: [] for version in engines}
        chance = random.Random(1)
        for number in range(given.legs):
            for version, engine in engines.items():
                took_s = {}
                for is_on in (True, False) if number % 2 else (False, True):
                    turn(folder / f"switch-{version}", is_on)
                    requests = workload(chance)[:NUM_REQUESTS]
                    took_s[is_on] = engine.call("generate", requests=requests)["wall_s"]
                ratios[version].append(took_s[True] / took_s[False])
        load = os.getloadavg()[0]
    median = statistics.median
    pinned_s = median(found_s[HERE])
    rows = [
        [
            version,
            f"{computed_s[version]:.2f}",
            f"{1000 * median(found_s[version]):.1f}",
            f"{100 * (median(found_s[version]) / pinned_s - 1):+.1f} %",
            f"{100 * (median(ratios[version]) - 1):+.1f} %",
            " ".join(f"{100 * (ratio - 1):+.1f}" for ratio in ratios[version]),
        ]
        for version in engines
    ]
    print(
        f"{given.tokens} tokens; nothing found: {NUM_REQUESTS} x {PROMPT_TOKENS} + {NEW_TOKENS} tokens a leg"
    )
    print(render(["vLLM", "computed s", "found ms", "to this", "more time", "each pair"], rows))
    print(f"load {load:.1f} at its end")


if __name__ == "__main__":
    main()
