"""`python -m bench.kvcache_simulator TRACE…`: kvtier's replay beside the field's public simulator.

`kvcache-simulator` (kvcache.ai, on the package index; 0.1.3) counts hits of a trace under a budget in GiB of
a model's KV cache. Both run here on the same files with the same budgets, and must agree: two programs that
share no code and count the same tokens are a check of either. Install it in an environment of its own:

    python3 -m venv kvcache-simulator && kvcache-simulator/bin/pip install kvcache-simulator
    python -m bench.kvcache_simulator TRACE.jsonl.gz --simulator kvcache-simulator/bin/kvcache-simulator

It fills the cache with the first half of the requests and counts tokens of the second; kvtier's replay counts
all, so what a replay of the first half alone finds is taken off. Budgets that the first half does not fill it
leaves out. Its `optimal` looks at the next request that uses a block, kvtier's `clairvoyant` does, too.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

MODEL = "llama-3.1-8b"  # in either catalogue
BLOCK_TOKENS = 512
POLICIES = {"lru": "lru", "clairvoyant": "optimal"}
BUDGETS_GIB = "64,128,256,512,1024,2048"
JSON = list[dict[str, Any]]


def simulated(simulator: str, trace: Path, budgets: str) -> dict[str, Any]:
    """Return what the other simulator prints."""
    with tempfile.NamedTemporaryFile(suffix=".json") as out:
        command = [simulator, "run", "--trace", str(trace), "--model", MODEL, "--budgets-gib", budgets]
        command += ["--block-size", str(BLOCK_TOKENS), "--policies", ",".join(POLICIES.values())]
        subprocess.run([*command, "--format", "json", "--no-progress", "-o", out.name], check=True)
        found: dict[str, Any] = json.loads(Path(out.name).read_text())
        return found


def replayed(trace: Path, budgets: list[float], num_first: int | None = None) -> JSON:
    """Return the outcomes of kvtier's replay."""
    command = [sys.executable, "-m", "kvtier", "replay", str(trace), "--json", "--model", MODEL]
    command += [word for policy in POLICIES for word in ("--policy", policy)]
    command += ["--block-tokens", str(BLOCK_TOKENS), "--capacity", ",".join(f"{gib:g}GiB" for gib in budgets)]
    command += ["--first", str(num_first)] if num_first else []
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    outcomes: JSON = json.loads(done.stdout)["outcomes"]
    return outcomes


def second_half(trace: Path, budgets: list[float], num_first: int) -> dict[tuple[str, int], float]:
    """Return the hit ratio of tokens after the first requests, by policy and place of the budget, and how
    many tokens were asked for under ("tokens", 0)."""
    ratios: dict[tuple[str, int], float] = {}
    for whole, half in zip(replayed(trace, budgets), replayed(trace, budgets, num_first), strict=True):
        num_found = sum(whole["token_hits"].values()) - sum(half["token_hits"].values())
        num_tokens = whole["num_tokens"] - half["num_tokens"]
        number = sum(policy == whole["policy"] for policy, _ in ratios)
        ratios[whole["policy"], number] = num_found / num_tokens
        ratios["tokens", 0] = num_tokens
    return ratios


def table(trace: Path, simulator: str, budgets: str) -> None:
    """Print the rows of a trace. Raises AssertionError when the two did not count the same tokens."""
    other = simulated(simulator, trace, budgets)
    ratios = second_half(
        trace, [point["gib"] for point in other["points"]], other["metadata"]["warmupRequests"]
    )
    num_tokens = other["metadata"]["totalMeasuredTokens"]
    assert ratios["tokens", 0] == num_tokens, f"{ratios['tokens', 0]} tokens were asked for, not {num_tokens}"
    for number, point in enumerate(other["points"]):
        own = {policy: ratios[policy, number] for policy in POLICIES}
        theirs = [point["results"][name]["hitRate"] for name in POLICIES.values()]
        cells = [f"{ratio:.3%}" for pair in zip(own.values(), theirs, strict=True) for ratio in pair]
        speed_up = 1 / (1 - own["lru"])
        print(f"| {trace.name} | {point['gib']:,g} | {' | '.join(cells)} | {speed_up:.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.kvcache_simulator",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("traces", type=Path, nargs="+")
    parser.add_argument("--simulator", default="kvcache-simulator", help="its program")
    parser.add_argument("--budgets-gib", default=BUDGETS_GIB)
    arguments = parser.parse_args()
    names = [f"{own}, {program}" for own in POLICIES for program in ("kvtier", "simulator")]
    print(f"| trace | GiB | {' | '.join(names)} | ideal prefill speed-up with lru |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for trace in arguments.traces:
        table(trace, arguments.simulator, arguments.budgets_gib)


if __name__ == "__main__":
    main()
