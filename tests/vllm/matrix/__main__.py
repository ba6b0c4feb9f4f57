"""`python -m tests.vllm.matrix [VERSION ...]`: run what is not known.

A version's environment (2.5 GB) is made when its column begins, and removed behind it unless `--keep`. Stop
it when you like, and go on later: the rows of a file are recorded when the file has run. Cells that failed
run again, with `--again` all of them; `--only` takes rows by a part of their name or file.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from . import record
from .record import FAILED, NEVER_RAN, PASSES, REFUSED, ROOT, Cell
from .rows import NO_CPU_BUILD, PATCHES, PINNED, ROWS, Row

WANTED_GIB = 4
LIMIT_S = 7200.0


def main() -> None:
    """Exit 1 when a cell failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    default = [version for version in PATCHES if version not in NO_CPU_BUILD]
    parser.add_argument("versions", nargs="*", metavar="VERSION", help=f"by default {', '.join(default)}")
    parser.add_argument("--only", default="", help="rows with this in their name")
    parser.add_argument("--again", action="store_true", help="also cells that are known")
    parser.add_argument("--keep", action="store_true", help="do not remove the environment")
    given = parser.parse_args()
    has_failed = False
    for version in given.versions or default:
        rows = [row for row in ROWS if row.path and given.only in f"{row.name} {row.path}"]
        known = {} if given.again else record.load()
        todo = [row for row in rows if not is_known(known, version, row)]
        if todo:
            has_failed |= run_column(version, todo, given.keep)
    sys.exit(has_failed)


def is_known(cells: dict[tuple[str, str], Cell], version: str, row: Row) -> bool:
    """Whether a cell needs no run: it was run, and did not fail."""
    cell = cells.get((version, row.name))
    return cell is not None and cell.outcome != FAILED


def run_column(version: str, rows: Sequence[Row], is_kept: bool) -> bool:
    """Run rows of a version, file by file; return whether one failed."""
    if (free_gib := shutil.disk_usage(ROOT).free >> 30) < WANTED_GIB:
        sys.exit(f"{ROOT} has {free_gib} GiB free, a version's environment needs {WANTED_GIB}")
    environment = ROOT / (".venv-vllm" if version == PINNED else f".venv-vllm-{PATCHES[version]}")
    make(version, f"{environment.name}/.ready", ".cache/vllm-models/.ready")
    has_failed = False
    for path in dict.fromkeys(row.path for row in rows):
        for cell in run(environment / "bin" / "python", version, [row for row in rows if row.path == path]):
            record.add(cell)
            print(f"{version}  {cell.row}: {cell.outcome}  {cell.words}", flush=True)
            has_failed |= cell.outcome == FAILED
    if not is_kept and version != PINNED:
        shutil.rmtree(environment)
    return has_failed


def make(version: str, *targets: str) -> None:
    """Make what the Makefile makes for a version."""
    wanted = [] if version == PINNED else [f"VERSION={PATCHES[version]}"]
    subprocess.run(["make", "--no-print-directory", *wanted, *targets], cwd=ROOT, check=True)


def run(python: Path, version: str, rows: Sequence[Row]) -> list[Cell]:
    """Run rows of one file in an environment, which then starts the engines that they share once."""
    variables = {**os.environ, "KVTIER_MATRIX": "1"}
    if version == "0.28":
        variables["PYTHONHASHSEED"] = "0"

    def pytest(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(python), "-m", "pytest", "-q", "-o", "timeout=1800", *arguments]
        return subprocess.run(
            command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=LIMIT_S
        )

    listed = [line for line in pytest("--collect-only", rows[0].path).stdout.splitlines() if "::" in line]
    nodes = {row.name: [node for node in listed if row.keyword in node.partition("::")[2]] for row in rows}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        wanted = list(dict.fromkeys(node for names in nodes.values() for node in names))
        ended = pytest(f"--junitxml={report}", "-o", "junit_family=xunit1", *wanted)
        if ended.returncode:
            print(ended.stdout[-4000:], flush=True)
        cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
    told = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    cells = []
    for row in rows:
        own = [case for case in cases if row.keyword in str(case.get("name"))]
        outcome, words = outcome_of(own, len(nodes[row.name]))
        today = f"{datetime.now(UTC):%Y-%m-%d}"
        cells.append(Cell(version, row.name, outcome, words, len(own), told.stdout.strip(), today))
    return cells


def outcome_of(cases: Sequence[ElementTree.Element], num_wanted: int) -> tuple[str, str]:
    """Return how a row's tests ended, and the words of what was refused or could not run."""
    if not cases or len(cases) < num_wanted:
        return FAILED, f"{len(cases)} of {num_wanted} tests ran"
    for case in cases:
        if case.find("failure") is not None or case.find("error") is not None:
            return FAILED, f"{case.get('name')}"
    skipped = [found.get("message", "") for case in cases if (found := case.find("skipped")) is not None]
    if len(skipped) == len(cases):
        return NEVER_RAN, skipped[0]
    refused = [
        found.get("value", "")
        for case in cases
        for found in case.iter("property")
        if found.get("name") == "refused"
    ]
    return (REFUSED, refused[0]) if refused else (PASSES, "")


if __name__ == "__main__":
    main()
