"""docs/compatibility.md, from what was run."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from . import record
from .record import NEVER_RAN, PASSES, ROOT, Cell
from .rows import NO_CPU_BUILD, PATCHES, ROWS, Row

NOT_YET = "not run yet: one to ten minutes of an idle machine; `make test-matrix` goes on where it stopped"
HEAD = """# Compatibility

Which versions of vLLM do what with kvtier, as tests on their real builds for the CPU showed. Generated from
`docs/data/compatibility.json`, which `make test-matrix` writes; `make docs` prints it.

The other runtimes are [below](#other-runtimes).

*passes*: the row's tests did, so many, every answer compared. *refused*: the engine runs, kvtier says why
it serves nothing to it. *never ran*: nothing was shown, and why. Of the interface of 0.28 the 18 tests of
layouts are left out: before 0.29 each backend of vLLM lays KV out by itself, with nothing to compare.

"""
OTHERS = ROOT / "docs" / "data" / "other-runtimes.txt"  # by hand


def compatibility_page() -> Iterator[tuple[Path, bytes]]:
    """Yield docs/compatibility.md."""
    yield ROOT / "docs" / "compatibility.md", page(record.load()).encode()


def page(cells: Mapping[tuple[str, str], Cell]) -> str:
    """Return the table, and below it the words and where each row was shown."""
    versions = list(PATCHES)
    lines = [f"| feature | {' | '.join(versions)} |", "|" + "---|" * (len(versions) + 1)]
    notes: dict[str, int] = {}
    for row in ROWS:
        shown = [_cell(row, version, cells, notes) for version in versions]
        lines.append(f"| {row.name} | {' | '.join(shown)} |")
    text = HEAD + "\n".join(lines) + "\n"
    if notes:
        text += "\n## Words\n\n" + "\n".join(f"{number}. {words}" for words, number in notes.items()) + "\n"
    text += "\n## Tests\n\n| feature | tests |\n|---|---|\n"
    text += "".join(f"| {row.name} | {_tests_of(row)} |\n" for row in ROWS if row.path)
    text += "\n" + OTHERS.read_text()
    dates = sorted({(cell.version, cell.date, cell.commit[:8]) for cell in cells.values()})
    text += "\n## Runs\n\n| vLLM | date | commit |\n|---|---|---|\n"
    return text + "".join(f"| {version} | {date} | `{commit}` |\n" for version, date, commit in dates)


def _cell(row: Row, version: str, cells: Mapping[tuple[str, str], Cell], notes: dict[str, int]) -> str:
    if not row.path:
        return f"{NEVER_RAN} ({_note(row.why_not, notes)})"
    cell = cells.get((version, row.name))
    if cell is None:
        return f"{NEVER_RAN} ({_note(NO_CPU_BUILD.get(version, NOT_YET), notes)})"
    if cell.outcome == PASSES:
        return f"passes ({cell.num_tests})"
    return f"{cell.outcome} ({_note(cell.words, notes)})"


def _note(words: str, notes: dict[str, int]) -> int:
    return notes.setdefault(words.replace("|", "\\|"), len(notes) + 1)


def _tests_of(row: Row) -> str:
    wanted = f": *{row.keyword}*" if row.keyword else ""
    return f"`{row.path.removeprefix('tests/vllm/')}`{wanted}"
