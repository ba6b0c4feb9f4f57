"""Everything that needs a GPU, in one call: contract tests, kernels, benchmarks; results as files.

    python -m bench.gpu [--out DIR] [--total MIB] [--budget SECONDS] [--dry-run]

For a machine that is lent for minutes: no network, nothing is asked, one step's failure does not keep the
next from running, every step has a log and a limit of its own, and what says most comes first. When the
budget is spent, what has not run is said to be owed. `summary.json` says what ran, how long and how it ended;
`results.tgz` is all of it in one file; `--dry-run` goes through the same steps on the fake device, so that
what can break without a GPU is found before.

At the default size the copies of `device` add up to 170 GB, all compared at the end of each round, those to
dram hashed one by one.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUDGET_S = 540.0
LEAST_S = 10.0  # with less than this left a step is not begun
DRY_LIMIT_S = 600.0  # of one step: a busy machine without a GPU takes its time


@dataclass(frozen=True, slots=True)
class Step:
    """One command. `needs` is a program without which it is left out."""

    name: str
    command: tuple[str, ...]
    limit_s: float
    needs: str = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a step ended: its exit code, or why it did not run."""

    name: str
    command: str
    seconds: float
    exit_code: int | None
    reason: str = ""


def steps(out: Path, total_mib: int, is_dry: bool) -> list[Step]:
    """Return what is run, what says most first: a machine may be taken away."""
    # -W default: what warns on somebody else's machine, a newer numpy or torch, is not what is tested there.
    python = sys.executable
    pytest = (python, "-m", "pytest", "-q", "-rs", "-W", "default", "-p", "no:cacheprovider")
    device = ("--device", "fake" if is_dry else "cuda")
    tests = ("tests/tiers/gpu/test_gpu_tests.py",) if is_dry else ("-m", "gpu", "tests/gpu")
    kernels = (*pytest, "-m", "gpu", "tests/gpu/test_kernels.py")
    doctor = (python, "-m", "kvtier.appliance.cli", "doctor", "--json")
    on_device = () if is_dry else ("--set", "tiers.hbm.capacity=1GiB", "--set", "tiers.hbm.backend=cuda")
    contracts = (*pytest, *(() if is_dry else ("-m", "gpu")), "tests/contracts/test_devices.py")

    def bench(name: str, *arguments: str) -> tuple[str, ...]:
        return (python, "-m", f"bench.{name}", *device, *arguments, "--json", str(out / f"{name}.json"))

    small = ("--small",) if is_dry else ()
    few = ("--total", "16") if is_dry else ()
    return [
        Step("nvidia-smi", ("nvidia-smi", "-q", "-d", "MEMORY,CLOCK,POWER,PERFORMANCE"), 20, "nvidia-smi"),
        Step("topology", ("nvidia-smi", "topo", "-m"), 20, "nvidia-smi"),
        Step("doctor", (*doctor, *on_device), 30),
        Step("tests", (*pytest, *tests), 120),
        Step("device", bench("device", "--total", str(total_mib)), 150),
        Step("pages", bench("pages", *small), 150),
        Step("cold", bench("cold_edge", *few), 120),
        Step("contracts", contracts, 90),
        Step("direct", (python, "-m", "bench.direct"), 60),
        Step("sanitizer", ("compute-sanitizer", "--error-exitcode", "9", *kernels), 120, "compute-sanitizer"),
    ]


def run(step: Step, out: Path, limit_s: float) -> Outcome:
    """Run one step; its output goes to DIR/NAME.log. What it started ends with it."""
    command = " ".join(step.command)
    if step.needs and shutil.which(step.needs) is None:
        return Outcome(step.name, command, 0.0, None, f"{step.needs} is not installed")
    if limit_s < LEAST_S:
        return Outcome(step.name, command, 0.0, None, "owed: the budget was spent")
    began_at = time.monotonic()
    paths = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    with (out / f"{step.name}.log").open("w") as log:
        log.write(f"$ {command}\n")
        log.flush()
        process = subprocess.Popen(
            step.command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True
        )
        try:
            exit_code: int | None = process.wait(limit_s)
            reason = ""
        except subprocess.TimeoutExpired:
            exit_code, reason = None, f"not done in {limit_s:.0f} s"
        if exit_code != 0:  # daemons and runtimes it may have left behind are in its session
            _end(process)
    return Outcome(step.name, command, time.monotonic() - began_at, exit_code, reason)


def _end(process: "subprocess.Popen[bytes]") -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def pack(out: Path) -> None:
    """Put every log and table into one file, for machines that give few files back."""
    with tarfile.open(out / "results.tgz", "w:gz") as archive:
        for path in sorted([*out.glob("*.log"), *out.glob("*.json")]):
            archive.add(path, path.name)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description="all that needs a GPU")
    parser.add_argument("--out", type=Path, default=ROOT / "out", metavar="DIR", help="default: out/")
    parser.add_argument("--total", type=int, default=0, metavar="MIB", help="of each tier in bench.device")
    parser.add_argument("--budget", type=float, default=BUDGET_S, metavar="SECONDS", help="of all steps")
    parser.add_argument("--dry-run", action="store_true", help="on the fake device: figures mean nothing")
    parser.add_argument("--only", metavar="NAMES", help="comma-separated steps")
    args = parser.parse_args()
    out: Path = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    wanted = steps(out, args.total or (128 if args.dry_run else 4096), args.dry_run)
    if args.only:
        names = args.only.split(",")
        if unknown := set(names) - {step.name for step in wanted}:
            parser.error(f"unknown steps {', '.join(sorted(unknown))}")
        wanted = [step for step in wanted if step.name in names]
    outcomes = []
    end_at = time.monotonic() + args.budget
    for step in wanted:
        limit_s = DRY_LIMIT_S if args.dry_run else min(step.limit_s, end_at - time.monotonic())
        outcome = run(step, out, limit_s)
        outcomes.append(asdict(outcome))
        verdict = outcome.reason or f"exit code {outcome.exit_code}"
        print(f"{outcome.name:12}{outcome.seconds:7.1f} s  {verdict}", flush=True)
        summary = {"is_dry_run": args.dry_run, "steps": outcomes}
        (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
        pack(out)
    print(f"\nresults: {out}")
    # Exit code 1 of the doctor says that the host is not ready, which the tests say, too.
    return int(any(o["exit_code"] not in (0, None) for o in outcomes if o["name"] != "doctor"))


if __name__ == "__main__":
    sys.exit(main())
