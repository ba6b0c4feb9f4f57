"""Runs the commands of claims again, and adds what they showed to the ledger."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime

from bench.machine import describe

from .ledger import PATH, ROOT, Claim, Run
from .page import PAGE

#: When a claim's command failed last, by name. Not in the ledger: this machine may lack what it needs.
FAILURES = ROOT / ".cache" / "claims-failed.json"
#: A command may take twice as long as stated and this: one that hangs costs the others no more.
SPARE_S = 300.0


class NotRun(Exception):
    """What the command needs is not here; the text says what."""


def arguments_of(command: str) -> list[str]:
    """Return a command's words with this interpreter and the environment's variables.
    Raises NotRun when a variable is not set."""
    words = [os.path.expandvars(word) for word in command.split()]
    if unset := [word for word in words if "$" in word]:
        raise NotRun(f"set {', '.join(word.partition('/')[0] for word in unset)}")
    if words[0] == "python":
        return [sys.executable, *words[1:]]
    return [sys.executable, "-m", "kvtier.appliance.cli", *words[1:]] if words[0] == "kvtier" else words


def commit_here() -> str:
    """Return the commit of this tree, with `+` when there are changes to other files than the ledger's."""
    head = ["git", "rev-parse", "--short=10", "HEAD"]
    name = subprocess.run(head, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    ledgers = [f":!{path.relative_to(ROOT)}" for path in (PATH, PAGE)]
    has_changed = subprocess.run(["git", "diff", "--quiet", "HEAD", "--", ".", *ledgers], cwd=ROOT).returncode
    return name + ("+" if has_changed else "")


def run(claim: Claim) -> Claim:
    """Return the claim with one run more. Raises NotRun, and ValueError with the output's end when the
    command failed, took far longer than stated, or a figure is not in what it printed."""
    machine, commit = describe({}), commit_here()
    printed = _printed(arguments_of(claim.command), limit_s=SPARE_S + 120 * claim.minutes)
    shown = {figure.name: figure.read(printed) for figure in claim.figures}
    rig = f"{machine['cpu'].partition(', last')[0]}, load {machine['load'].split()[0]}"
    return replace(claim, runs=(*claim.runs, Run(_now(), commit, rig, shown)))


def _printed(command: list[str], limit_s: float) -> str:
    """Return what a command printed. One that takes longer than `limit_s` is killed, with what it started."""
    with subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            printed = "".join(process.communicate(timeout=limit_s))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise ValueError(f"did not end within {limit_s:.0f} s") from None
    if process.returncode:
        raise ValueError(f"exit status {process.returncode}: {printed[-1500:]}")
    return printed


def left_to_run(claims: list[Claim], commit: str) -> list[Claim]:
    """Return the claims that can be run again and were not run at `commit`, those first that were run, or
    failed, longest ago: a call that has little time would begin with the same failures for ever."""
    is_new = commit.endswith("+")  # the changes may be others
    failed = failures()
    can_run = [one for one in claims if one.minutes and (is_new or one.runs[-1].commit != commit)]
    return sorted(can_run, key=lambda claim: max(claim.runs[-1].date, failed.get(claim.name, "")))


def failures() -> dict[str, str]:
    """Return when the commands that failed did so last, by claim."""
    return dict(json.loads(FAILURES.read_text())) if FAILURES.exists() else {}


def _note_failure(name: str) -> None:
    FAILURES.parent.mkdir(exist_ok=True)
    FAILURES.write_text(json.dumps(failures() | {name: _now()}))


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")


def run_all(
    claims: list[Claim], chosen: list[Claim], minutes: float, keep: Callable[[list[Claim]], None]
) -> tuple[list[Claim], list[str], list[str]]:
    """Return all claims, the chosen ones with another run each, what did not run, and what failed, a line
    each. None begins that would not end within `minutes`, of the clock: what cannot run here leaves its time
    to the others. `keep` is called after each."""
    after: dict[str, Claim] = {claim.name: claim for claim in claims}
    not_run: list[str] = []
    failed: list[str] = []
    ends_at = time.monotonic() + 60 * minutes
    for claim in chosen:
        began_at = time.monotonic()
        try:
            if began_at + 60 * claim.minutes > ends_at:
                raise NotRun("no time is left for it; the next call goes on here")
            after[claim.name] = run(claim)
        except NotRun as error:
            not_run.append(f"{claim.name}: {error}")
            print(f"{claim.name}: not run: {error}", flush=True)
            continue
        except ValueError as error:
            failed.append(f"{claim.name}: {error}")
            _note_failure(claim.name)
            print(f"{claim.name}: FAILED: {error} [{time.monotonic() - began_at:.0f} s]", flush=True)
            continue
        keep(list(after.values()))
        drift = after[claim.name].drifted()
        said = f"DRIFTED: {'; '.join(drift)}" if drift else "as claimed"
        print(f"{claim.name}: {said} [{time.monotonic() - began_at:.0f} s]", flush=True)
    return list(after.values()), not_run, failed
