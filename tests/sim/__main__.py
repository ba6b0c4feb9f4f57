"""Command line of the simulator; see the package's docstring."""

import argparse
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial

from .mutants import MUTANTS, Kill, Mutant, hunt
from .run import Outcome, run_seed

MODES = {"on": (True,), "off": (False,), "both": (True, False)}


def main() -> int:
    """Run what was asked for; 0 when nothing was violated."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=2000, help="seeds per mode")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=multiprocessing.cpu_count())
    parser.add_argument("--verify", choices=MODES, default="both", help="whether cold reads are verified")
    parser.add_argument("--operations", type=int, default=0, help="per seed; 0: drawn")
    parser.add_argument("--trace", type=int, metavar="SEED", help="print the log of one seed (with --verify)")
    parser.add_argument("--mutants", action="store_true", help="which check kills which planted defect")
    arguments = parser.parse_args()
    if arguments.trace is not None:
        return _trace(arguments.trace, MODES[arguments.verify][0], arguments.operations)
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    if arguments.mutants:
        return _mutants(seeds, arguments.jobs)
    return max([_simulate(seeds, verify, arguments) for verify in MODES[arguments.verify]])


def _simulate(seeds: range, verify: bool, arguments: argparse.Namespace) -> int:
    mode = "verify" if verify else "unmask"
    began = time.monotonic()
    counts: Counter[str] = Counter()
    num_events = num_repeated = 0
    virtual_s = 0.0
    failures = []
    run = partial(run_seed, verify=verify, num_operations=arguments.operations)
    for outcome in _each(run, seeds, arguments.jobs):
        counts += outcome.counts
        num_events += outcome.num_events
        virtual_s += outcome.virtual_s
        if outcome.check:
            failures.append(outcome)
        if outcome.seed % 100 == 0:  # one in a hundred twice
            num_repeated += 1
            if run(outcome.seed).fingerprint != outcome.fingerprint:
                outcome.check, outcome.message = "determinism", "two runs, two logs"
                failures.append(outcome)
    took_s = time.monotonic() - began
    print(
        f"{mode}: {len(seeds)} seeds, {num_events} events, {virtual_s / 3600:.1f} virtual hours in "
        f"{took_s:.1f} s ({len(seeds) / took_s:.0f} seeds/s); {num_repeated} repeated; "
        f"{len(failures)} violations"
    )
    print("  " + ", ".join(f"{name} {count}" for name, count in sorted(counts.items())))
    for outcome in failures[:10]:
        print(f"  seed {outcome.seed} ({mode}): {outcome.message}")
        print(f"    python -m tests.sim --trace {outcome.seed} --verify {'on' if verify else 'off'}")
    return 1 if failures else 0


def _each(run: "partial[Outcome]", seeds: range, jobs: int) -> Iterator[Outcome]:
    if jobs <= 1:
        yield from map(run, seeds)
        return
    with multiprocessing.Pool(jobs) as pool:
        yield from pool.imap_unordered(run, seeds, chunksize=50)


def _trace(seed: int, verify: bool, num_operations: int) -> int:
    """Print the log of a seed and, when it fails, the smallest number of operations that still does."""
    trace: list[str] = []
    outcome = run_seed(seed, verify, num_operations, trace)
    print("number\ttime_s\twhat\tdetail")
    print("\n".join(trace))
    if not outcome.check:
        print(f"seed {seed}: nothing was violated; fingerprint {outcome.fingerprint:08x}")
        return 0
    print(outcome.trace_back)
    smallest = next((n for n in range(1, 81) if run_seed(seed, verify, n).check == outcome.check), None)
    if smallest is not None:
        print(f"shorter: --trace {seed} --verify {'on' if verify else 'off'} --operations {smallest}")
    return 1


def _mutants(seeds: range, jobs: int) -> int:
    print(f"{'mutant':24} {'mode':7} {'killed':>11} {'first':>6}  seen by")
    alive = []
    with multiprocessing.Pool(jobs) as pool:
        for mutant, kills in zip(
            MUTANTS, pool.imap(partial(_hunt, seeds=seeds), range(len(MUTANTS))), strict=True
        ):
            alive += [mutant.name] if not any(kill.num_killed for kill in kills) else []
            for mode, kill in zip(("verify", "unmask"), kills, strict=True):
                killed = f"{kill.num_killed}/{kill.num_seeds}"
                print(
                    f"{mutant.name:24} {mode:7} {killed:>11} {kill.first_seed:>6}  {kill.checks}", flush=True
                )
    print(
        f"{len(MUTANTS) - len(alive)} of {len(MUTANTS)} mutants killed"
        + (f"; alive: {alive}" if alive else "")
    )
    return 1 if alive else 0


def _hunt(number: int, seeds: range) -> tuple[Kill, ...]:
    mutant: Mutant = MUTANTS[number]
    return tuple(hunt(mutant, verify, seeds, stop_at_first=False) for verify in (True, False))


if __name__ == "__main__":
    sys.exit(main())
