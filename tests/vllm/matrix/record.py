"""How each cell ended: docs/data/compatibility.json. A cell is replaced when it runs again."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PATH = ROOT / "docs" / "data" / "compatibility.json"
PASSES, REFUSED, NEVER_RAN, FAILED = "passes", "refused", "never ran", "FAILED"


@dataclass(frozen=True, slots=True)
class Cell:
    """One feature in one version. `words` say what was refused, or why nothing ran."""

    version: str
    row: str
    outcome: str
    words: str
    num_tests: int
    commit: str
    date: str


def load(path: Path = PATH) -> dict[tuple[str, str], Cell]:
    """Return all cells by version and row."""
    found = json.loads(path.read_text())["cells"] if path.exists() else []
    return {(cell["version"], cell["row"]): Cell(**cell) for cell in found}


def add(cell: Cell, path: Path = PATH) -> None:
    """Add a cell to the file, or replace it."""
    cells = {**load(path), (cell.version, cell.row): cell}
    path.parent.mkdir(exist_ok=True)
    ordered = [asdict(cells[key]) for key in sorted(cells)]
    path.write_text(json.dumps({"cells": ordered}, indent=1) + "\n")
