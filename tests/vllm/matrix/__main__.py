"""`python -m tests.vllm.matrix [VERSION ...]`: run what is not known, the first rows of all versions first.

Environments are made when they are first needed, and removed at the end unless `--keep`. Stop it when you
like, and go on later: a cell is recorded when its tests have run (rows that share an engine together). Cells
that failed run again, with `--again` all of them; `--only` takes rows by a part of their name or file.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

from . import record
from .record import FAILED, NEVER_RAN, PASSES, REFUSED, ROOT, Cell
from .rows import INTERFACE, NO_CPU_BUILD, PATCHES, PINNED, ROWS, SHARED, Row

WANTED_GIB = 4
LIMIT_S = 7200.0


def main() -> None:
    """Exit 1 when a cell failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("versions", nargs="*", metavar="VERSION", help="by default all")
    parser.add_argument("--only", default="", help="rows with this in their name")
    parser.add_argument("--again", action="store_true", help="also cells that are known")
    parser.add_argument("--keep", action="store_true", help="do not remove the environments")
    given = parser.parse_args()
    versions = given.versions or list(PATCHES)
    has_failed = False
    try:
        for together in rows_together(given.only):
            for version in versions:
                known = {} if given.again else record.load()
                if todo := [
                    row for row in together if runs_in(version, row) and not is_known(known, version, row)
                ]:
                    has_failed |= run_cells(version, todo)
    finally:
        for version in versions:
            if not given.keep and version != PINNED:
                shutil.rmtree(environment_of(version), ignore_errors=True)
    sys.exit(has_failed)


def rows_together(part: str) -> Iterator[list[Row]]:
    """Yield the rows with `part` in their name or file, those that share an engine together."""
    rows = [row for row in ROWS if row.path and part in f"{row.name} {row.path}"]
    for key in dict.fromkeys(row.path if row.path in SHARED else row.name for row in rows):
        yield [row for row in rows if key in (row.path, row.name)]


def runs_in(version: str, row: Row) -> bool:
    """Whether a row can run in a version: of one without a build for the CPU, only the interface."""
    return version not in NO_CPU_BUILD or row.path == INTERFACE


def is_known(cells: dict[tuple[str, str], Cell], version: str, row: Row) -> bool:
    """Whether a cell needs no run: it was run, and did not fail."""
    cell = cells.get((version, row.name))
    return cell is not None and cell.outcome != FAILED


def environment_of(version: str) -> Path:
    """Return the folder of a version's environment."""
    return ROOT / (".venv-vllm" if version == PINNED else f".venv-vllm-{PATCHES[version]}")


def run_cells(version: str, rows: Sequence[Row]) -> bool:
    """Run rows of one file in a version's environment; return whether one failed."""
    environment = environment_of(version)
    free_gib = shutil.disk_usage(ROOT).free >> 30
    if free_gib < WANTED_GIB and not environment.exists():
        sys.exit(f"{ROOT} has {free_gib} GiB free, a version's environment needs {WANTED_GIB}")
    wanted = [] if version == PINNED else [f"VERSION={PATCHES[version]}"]
    targets = [f"{environment.name}/.ready"]
    if version not in NO_CPU_BUILD:
        targets.append(".cache/vllm-models/.ready")
    subprocess.run(["make", "--no-print-directory", *wanted, *targets], cwd=ROOT, check=True)
    cells = run(environment / "bin" / "python", version, rows)
    for cell in cells:
        record.add(cell)
        print(f"{version}  {cell.row}: {cell.outcome}  {cell.words}", flush=True)
    return any(cell.outcome == FAILED for cell in cells)


def run(python: Path, version: str, rows: Sequence[Row]) -> list[Cell]:
    """Run rows of one file in an environment, which then starts the engines that they share once."""
    variables = {**os.environ, "KVTIER_MATRIX": "1"}
    if version == "0.28":
        variables["PYTHONHASHSEED"] = "0"

    def pytest(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(python), "-m", "pytest", "-q", "-W", "default", "-o", "timeout=1800", *arguments]
        return subprocess.run(
            command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=LIMIT_S
        )

    collected = pytest("--collect-only", rows[0].path)
    if collected.returncode:
        print(collected.stdout[-4000:], flush=True)
    # Of a folder with a file that cannot be imported nothing runs: the rest would pass for all of it.
    listed = [line for line in collected.stdout.splitlines() if "::" in line and not collected.returncode]
    nodes = {row.name: [node for node in listed if row.keyword in node.partition("::")[2]] for row in rows}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        wanted = list(dict.fromkeys(node for names in nodes.values() for node in names))
        # Its own folder: pytest deletes those of earlier runs, this one among them when others run meanwhile.
        options = (f"--junitxml={report}", "-o", "junit_family=xunit1", f"--basetemp={folder}/t")
        ended = pytest(*options, *wanted) if wanted else collected
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
