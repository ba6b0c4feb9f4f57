"""Everything that needs a GPU, in one call: contract tests, kernels, benchmarks; results as files.

    python -m bench.gpu [--out DIR] [--total MIB] [--dry-run]

For a machine that is lent for minutes: no network, nothing is asked, one step's failure does not keep the
next from running, and every step has a log of its own. `summary.json` says what ran, how long and how it
ended; `--dry-run` goes through the same steps on the fake device, so that what can break without a GPU is
found before.

At the default size the copies add up to 170 GB, all compared at the end of each round, those to dram hashed
one by one.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 300  # of one step


@dataclass(frozen=True, slots=True)
class Step:
    """One command. `needs` is a program without which it is left out."""

    name: str
    command: tuple[str, ...]
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
    python, pytest = sys.executable, (sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider")
    device = "fake" if is_dry else "cuda"
    tests = ("tests/tiers/gpu/test_gpu_tests.py",) if is_dry else ("-m", "gpu", "tests/gpu")
    kernels = (*pytest, "-m", "gpu", "tests/gpu/test_kernels.py")
    doctor = (python, "-m", "kvtier.appliance.cli", "doctor", "--json")
    on_device = () if is_dry else ("--set", "tiers.hbm.capacity=1GiB", "--set", "tiers.hbm.backend=cuda")
    bench = (python, "-m", "bench.device", "--device", device, "--total", str(total_mib))
    return [
        Step("nvidia-smi", ("nvidia-smi", "-q", "-d", "MEMORY,CLOCK,POWER,PERFORMANCE"), "nvidia-smi"),
        Step("topology", ("nvidia-smi", "topo", "-m"), "nvidia-smi"),
        Step("doctor", (*doctor, *on_device)),
        Step("tests", (*pytest, *tests)),
        Step("contracts", (*pytest, *(() if is_dry else ("-m", "gpu")), "tests/contracts/test_devices.py")),
        Step("device", (*bench, "--json", str(out / "device.json"))),
        Step("direct", (python, "-m", "bench.direct")),
        Step("sanitizer", ("compute-sanitizer", "--error-exitcode", "9", *kernels), "compute-sanitizer"),
    ]


def run(step: Step, out: Path) -> Outcome:
    """Run one step; its output goes to DIR/NAME.log."""
    command = " ".join(step.command)
    if step.needs and shutil.which(step.needs) is None:
        return Outcome(step.name, command, 0.0, None, f"{step.needs} is not installed")
    began_at = time.monotonic()
    paths = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    with (out / f"{step.name}.log").open("w") as log:
        try:
            ended = subprocess.run(
                step.command, cwd=ROOT, env=environment, stdout=log, stderr=log, timeout=LIMIT_S, check=False
            )
        except subprocess.TimeoutExpired:
            return Outcome(step.name, command, time.monotonic() - began_at, None, f"not done in {LIMIT_S} s")
    return Outcome(step.name, command, time.monotonic() - began_at, ended.returncode)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description="all that needs a GPU")
    parser.add_argument("--out", type=Path, default=ROOT / "out", metavar="DIR", help="default: out/")
    parser.add_argument("--total", type=int, default=0, metavar="MIB", help="of each tier in bench.device")
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
    for step in wanted:
        outcome = run(step, out)
        outcomes.append(asdict(outcome))
        verdict = outcome.reason or f"exit code {outcome.exit_code}"
        print(f"{outcome.name:12}{outcome.seconds:7.1f} s  {verdict}", flush=True)
        summary = {"is_dry_run": args.dry_run, "steps": outcomes}
        (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    print(f"\nresults: {out}")
    # Exit code 1 of the doctor says that the host is not ready, which the tests say, too.
    return int(any(o["exit_code"] not in (0, None) for o in outcomes if o["name"] != "doctor"))


if __name__ == "__main__":
    sys.exit(main())
