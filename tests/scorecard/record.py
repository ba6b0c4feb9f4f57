"""What was run: docs/data/reliability.json, a list that only grows.

An entry says which row ran, at which size, with which command, on which commit and machine, when, for how
long, and what it showed. Failed runs are entries, too: what is left out of such a list makes it worthless.
"""

import json
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path

from .readers import Figures
from .rows import ROWS

ROOT = Path(__file__).resolve().parents[2]
PATH = ROOT / "docs" / "data" / "reliability.json"


FAILED = "failed"  # how the note of such a run begins


@dataclass(frozen=True, slots=True)
class Entry:
    """One run of one row. `figures` may be empty if it failed."""

    row: str
    size: int
    command: str
    commit: str
    date: str
    machine: str
    wall_s: int
    figures: Figures
    note: str = ""

    @property
    def has_failed(self) -> bool:
        """Whether it did not show what it was to show."""
        return self.note.startswith(FAILED)


def load(path: Path = PATH) -> list[Entry]:
    """Return all entries, oldest first. Raises ValueError for one of a row that is not there."""
    entries = [Entry(**entry) for entry in json.loads(path.read_text())["runs"]] if path.exists() else []
    if unknown := {entry.row for entry in entries} - {row.name for row in ROWS}:
        raise ValueError(f"{path.name} has runs of unknown rows: {sorted(unknown)}")
    return entries


def add(entry: Entry, path: Path = PATH) -> None:
    """Add an entry to the file."""
    path.parent.mkdir(exist_ok=True)
    text = json.dumps({"runs": [asdict(one) for one in [*load(path), entry]]}, indent=1)
    path.write_text(text + "\n")


def next_run(row: str, entries: list[Entry]) -> int:
    """Return the first seed of the next run of a row; none is used twice."""
    before = [entry for entry in entries if entry.row == row]
    return sum(entry.size for entry in before) + FIRST.get(row, 1)


#: Seeds below these were used while kvtier was written, for its tests and by hand.
FIRST = {"seeds": 1_000_000}


def sums(entries: list[Entry]) -> dict[str, Figures]:
    """Return the figures of each row added up over its runs."""
    total: dict[str, Figures] = defaultdict(lambda: defaultdict(float))
    for entry in entries:
        for name, value in entry.figures.items():
            total[entry.row][name] += value
    return total
