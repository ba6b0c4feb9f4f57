"""The first ten minutes on a GPU: every step a process of its own, two files come back.

    python -m tests.gpu.first_contact [OUT] [--device cuda|fake] [--budget SECONDS] [--only NAMES]

For a machine that is lent for minutes, has no network and gives a handful of files back. OUT (default: the
environment's OUT, else out/) gets `summary.json` and `first-contact.tar.gz` (every log, table and report) and
nothing else; both are written anew after every step, so what was learned is there if the machine is taken
away. All else happens in a temporary folder.

A step has a process and a session of its own, a limit, and a temporary folder that is removed after it: a
CUDA error that stays ("sticky"), a crash, a hang or a full disk ends that step and no other. Its output is
read through a pipe and kept in memory, the first and the last of it, so a step that writes gigabytes does
not fill the disk. A verdict is printed per step, and after one that failed the end of its log.

Exit code 1: a step failed, or none passed. `python -m tests.gpu.report OUT/summary.json` turns the figures
into the tables of docs/benchmarks/gpu.md.
"""

import argparse
import io
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[2]
BUDGET_S = 560.0  # a command on a lent machine has ten minutes
LEAST_S = 5.0  # with less than this left a step is not begun
END_S = 5.0  # for a killed process to go; one that waits in the driver may not
NEEDS_HARDWARE = 77  # exit code of a step that cannot mean anything here
HEAD_BYTES, TAIL_BYTES = 128 << 10, 256 << 10  # kept of a log
SHOWN_BYTES = 3000  # printed of the log of a step that failed
FIGURES_BYTES = 256 << 10  # larger ones are in the archive only
ARCHIVE_BYTES = 15 << 20  # of what goes into it, before it is compressed
SUMMARY, ARCHIVE = "summary.json", "first-contact.tar.gz"


@dataclass(frozen=True, slots=True)
class Step:
    """One command; `{results}` in it becomes the folder for NAME.json (figures) or NAME.xml (of pytest).

    `needs` is a program without which the step is left out. `hardware` says why the step means nothing
    without a GPU; it is then not run, and the summary says so. `accepts` are the exit codes of a step that
    did its work.
    """

    name: str
    command: tuple[str, ...]
    limit_s: float
    needs: str = ""
    hardware: str = ""
    accepts: tuple[int, ...] = (0,)


@dataclass(slots=True)
class Outcome:
    """How a step ended. `verdict`: passed, failed, timed out, needs hardware, not installed, or owed."""

    name: str
    command: str
    verdict: str
    reason: str = ""
    seconds: float = 0.0
    exit_code: int | None = None
    figures: Any = None
    left_out: list[str] = field(default_factory=list)


class Log:
    """The first HEAD_BYTES and the last TAIL_BYTES of what is read from a pipe, by a thread of its own."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self._head, self._tail, self._num_bytes = bytearray(), bytearray(), 0
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._read, args=(pipe,), daemon=True)
        self._thread.start()

    def _read(self, pipe: IO[bytes]) -> None:
        with pipe:
            while part := os.read(pipe.fileno(), 1 << 16):
                with self._lock:
                    self._num_bytes += len(part)
                    room = HEAD_BYTES - len(self._head)
                    self._head += part[: max(0, room)]
                    self._tail += part[max(0, room) :]
                    del self._tail[: max(0, len(self._tail) - TAIL_BYTES)]

    def close(self) -> bytes:
        """Return what was kept. A process that got away may hold the pipe open: it is not waited for."""
        self._thread.join(END_S)
        with self._lock:
            left_out = self._num_bytes - len(self._head) - len(self._tail)
            gap = b"\n[... %d bytes left out ...]\n" % left_out if left_out else b""
            return bytes(self._head) + gap + bytes(self._tail)


def run(step: Step, work: Path, limit_s: float) -> tuple[Outcome, bytes]:
    """Run one step; return how it ended and its log. What it started in its session ends with it."""
    results, scratch = work / "results", work / f"scratch-{step.name}"
    results.mkdir(exist_ok=True)
    scratch.mkdir()
    words = [word.replace("{results}", str(results)) for word in step.command]
    paths = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "PYTHONFAULTHANDLER": "1",
        "PYTHONUNBUFFERED": "1",
        "TMPDIR": str(scratch),
    }
    outcome = Outcome(step.name, " ".join(step.command), "failed")
    began_at = time.monotonic()
    try:
        process = subprocess.Popen(
            words,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as problem:
        shutil.rmtree(scratch, ignore_errors=True)
        outcome.reason = str(problem)
        return outcome, outcome.reason.encode()
    assert process.stdout is not None
    log = Log(process.stdout)
    try:
        outcome.exit_code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        outcome.verdict, outcome.reason = "timed out", f"not done in {limit_s:.0f} s"
    finally:
        ended = _end(process)
    outcome.seconds = round(time.monotonic() - began_at, 2)
    kept = log.close()
    shutil.rmtree(scratch, ignore_errors=True)  # before anything is written: it may have filled the disk
    if not ended:
        outcome.reason += "; it cannot be killed and is left behind (the driver holds it; see dmesg)"
    if outcome.exit_code is not None:
        outcome.verdict, outcome.reason = _verdict(outcome.exit_code, step.accepts)
    _collect(outcome, results)
    return outcome, kept


def _end(process: "subprocess.Popen[bytes]") -> bool:
    """Kill all that is left of a step's session; return whether its process is gone."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        return False
    return True


def _verdict(exit_code: int, accepts: Sequence[int]) -> tuple[str, str]:
    if exit_code == NEEDS_HARDWARE:
        return "needs hardware", "it says so itself"
    if exit_code < 0:
        with suppress(ValueError):
            return "failed", f"killed by {signal.Signals(-exit_code).name}"
    return ("passed" if exit_code in accepts else "failed", f"exit code {exit_code}" if exit_code else "")


def _collect(outcome: Outcome, results: Path) -> None:
    """Put a step's figures into its outcome; a run of pytest that skipped every test has shown nothing."""
    table, report = results / f"{outcome.name}.json", results / f"{outcome.name}.xml"
    try:
        if table.exists() and table.stat().st_size > FIGURES_BYTES:
            outcome.left_out.append(f"{table.name}: too large for the summary, see the archive")
        elif table.exists():
            outcome.figures = json.loads(table.read_text())
        if report.exists():
            suite = ElementTree.parse(report).getroot().find("testsuite")
            names = ("tests", "failures", "errors", "skipped")
            outcome.figures = {name: int(suite.attrib[name]) for name in names} if suite is not None else None
            counts = outcome.figures or {}
            if outcome.verdict == "passed" and counts.get("tests", 0) == counts.get("skipped", 0):
                outcome.verdict, outcome.reason = "needs hardware", "every test was skipped, see the log"
    except (OSError, ValueError, KeyError, ElementTree.ParseError) as problem:
        outcome.left_out.append(f"results cannot be read: {problem}")


class Report:
    """The two files in `out`."""

    def __init__(self, out: Path, work: Path, is_rehearsal: bool) -> None:
        self.outcomes: list[Outcome] = []
        self.unwritten: list[str] = []  # files of the last attempt, and why
        self._out, self._results = out, work / "results"
        self._is_rehearsal = is_rehearsal
        self._logs: dict[str, bytes] = {}

    def add(self, outcome: Outcome, log: bytes) -> None:
        """Take a step in and write both files. A full disk costs a file, not the other one, which was written
        before, nor the steps that follow."""
        self.outcomes.append(outcome)
        if log:
            self._logs[outcome.name] = f"$ {outcome.command}\n".encode() + log
        self.unwritten.clear()
        for name in (SUMMARY, ARCHIVE):
            try:
                archive, left_out = self._archive()
                self._write(name, archive if name == ARCHIVE else self.summary(left_out))
            except OSError as problem:
                self.unwritten.append(f"{self._out / name}: {problem.strerror}")
        if self.unwritten:
            print(f"not written, the next step tries again: {'; '.join(self.unwritten)}", flush=True)

    def summary(self, left_out: Sequence[str]) -> bytes:
        """Return what ran, how it ended, and its figures."""
        found = {
            "is_rehearsal": self._is_rehearsal,
            "machine": platform.platform(),
            "python": platform.python_version(),
            "left_out_of_archive": list(left_out),
            "steps": [asdict(outcome) for outcome in self.outcomes],
        }
        return json.dumps(found, indent=1).encode() + b"\n"

    def _archive(self) -> tuple[bytes, list[str]]:
        """Return all logs and results as one file, and the names of what was too much."""
        parts = [(f"{name}.log", log) for name, log in self._logs.items()]
        left_out, room = [], ARCHIVE_BYTES - sum(len(part) for _, part in parts)
        for path in sorted(self._results.glob("*")):
            if path.is_symlink() or not path.is_file() or path.stat().st_size > room:
                left_out.append(path.name)
                continue
            parts.append((path.name, path.read_bytes()))
            room -= len(parts[-1][1])
        parts.append((SUMMARY, self.summary(left_out)))
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w:gz") as archive:
            for name, part in parts:
                entry = tarfile.TarInfo(name)
                entry.size, entry.mtime = len(part), int(time.time())
                archive.addfile(entry, io.BytesIO(part))
        return packed.getvalue(), left_out

    def _write(self, name: str, content: bytes) -> None:
        part = self._out / f"{name}.part"
        try:
            part.write_bytes(content)
            part.replace(self._out / name)
        finally:
            part.unlink(missing_ok=True)


def run_all(steps: Sequence[Step], out: Path, budget_s: float, is_rehearsal: bool) -> list[Outcome]:
    """Run `steps` one after the other; return how each ended. Prints verdicts; leaves two files in `out`."""
    out.mkdir(parents=True, exist_ok=True)
    end_at = time.monotonic() + budget_s
    with tempfile.TemporaryDirectory(prefix="first-contact-", ignore_cleanup_errors=True) as folder:
        work = Path(folder)
        report = Report(out, work, is_rehearsal)
        for step in steps:
            outcome, log = _why_not(step, end_at, is_rehearsal), b""
            if outcome is None:
                outcome, log = run(step, work, min(step.limit_s, end_at - time.monotonic()))
            report.add(outcome, log)
            print(f"{outcome.name:18}{outcome.seconds:7.1f} s  {outcome.verdict:15} {outcome.reason}")
            if outcome.verdict in ("failed", "timed out"):
                print(_indented(log))
            sys.stdout.flush()
    if report.unwritten:
        kept = "older files are kept; free room there and repeat with --only"
        report.outcomes.append(Outcome("files", "", "failed", f"{'; '.join(report.unwritten)}; {kept}"))
        print(f"files              failed: {report.outcomes[-1].reason}")
    print(f"\n{out / SUMMARY}, {out / ARCHIVE}")
    for verdict in dict.fromkeys(outcome.verdict for outcome in report.outcomes):
        names = [outcome.name for outcome in report.outcomes if outcome.verdict == verdict]
        print(f"{len(names)} {verdict}: {', '.join(names)}", flush=True)
    return report.outcomes


def _why_not(step: Step, end_at: float, is_rehearsal: bool) -> Outcome | None:
    """Return the outcome of a step that is not begun."""
    command = " ".join(step.command)
    if is_rehearsal and step.hardware:
        return Outcome(step.name, command, "needs hardware", step.hardware)
    if step.needs and shutil.which(step.needs) is None:
        return Outcome(step.name, command, "not installed", f"{step.needs} is not in PATH")
    if end_at - time.monotonic() < LEAST_S:
        return Outcome(step.name, command, "owed", "the budget was spent")
    return None


def _indented(log: bytes) -> str:
    """Return the end of a log as text that a terminal and a JSON string survive."""
    text = log[-SHOWN_BYTES:].decode(errors="replace")
    printable = re.sub(r"[^\n\t\x20-\x7e\u00a0-\ud7ff]", "?", text)
    return "\n".join(f"    | {line}" for line in printable.splitlines())


def exit_code(outcomes: Sequence[Outcome]) -> int:
    """Return 0 when a step passed and none failed, else 1."""
    verdicts = {outcome.verdict for outcome in outcomes}
    return int("passed" not in verdicts or not verdicts.isdisjoint(("failed", "timed out")))


def main() -> int:
    from tests.gpu.steps import steps_of

    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu.first_contact", description="the first ten minutes on a GPU"
    )
    default = Path(os.environ.get("OUT") or ROOT / "out")
    parser.add_argument("out", type=Path, nargs="?", default=default, help="gets two files; default: $OUT")
    parser.add_argument("--device", choices=("cuda", "fake"), default="cuda", help="fake: a rehearsal")
    parser.add_argument("--budget", type=float, default=BUDGET_S, metavar="SECONDS", help="of all steps")
    parser.add_argument("--only", metavar="NAMES", help="comma-separated steps")
    args = parser.parse_args()
    steps = steps_of(args.device)
    if args.only:
        names = args.only.split(",")
        if unknown := set(names) - {step.name for step in steps}:
            known = ", ".join(step.name for step in steps)
            parser.error(f"unknown steps {', '.join(sorted(unknown))}; there are {known}")
        steps = [step for step in steps if step.name in names]
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the step under way ends with us
    outcomes = run_all(steps, args.out.resolve(), args.budget, args.device == "fake")
    return exit_code(outcomes)


if __name__ == "__main__":
    sys.exit(main())
