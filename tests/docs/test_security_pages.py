"""Every line of the threat model and of the page of limits names tests that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = {"SECURITY.md": "## What is protected", "docs/limits.md": "## Limits"}
#: `tests/folder/file.py::test_name` or `tests/folder/file.py`, also several in one cell.
TEST = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")
COMMAND = re.compile(r"`(make [\w-]+|python -m [\w.]+[^`]*)`")


def rows(page: str) -> list[str]:
    """Return the rows of all tables behind the first heading of a page that is checked."""
    text = (ROOT / page).read_text()
    table = text[text.index(PAGES[page]) :]
    lines = [line for line in table.splitlines() if line.startswith("|")]
    return [line for line in lines if not re.fullmatch(r"[|\s:-]+", line)]


def heads(page: str) -> int:
    """Return how many tables there are, each with one row of headings."""
    text = (ROOT / page).read_text()
    return len(re.findall(r"^\|[|\s:-]+\|$", text[text.index(PAGES[page]) :], re.M))


@pytest.mark.parametrize("page", PAGES)
def test_every_line_names_what_holds_it(page: str) -> None:
    without = [line for line in rows(page) if not TEST.search(line) and not COMMAND.search(line)]
    assert len(rows(page)) > 10
    assert len(without) == heads(page), without  # the headings


@pytest.mark.parametrize("page", PAGES)
def test_the_named_tests_exist(page: str) -> None:
    missing = []
    for line in rows(page):
        for path, name in TEST.findall(line):
            file = ROOT / path
            if not file.is_file() or (name and f"def {name}(" not in file.read_text()):
                missing.append(f"{path}::{name}")
    assert missing == []


def test_a_name_that_does_not_exist_is_noticed() -> None:
    assert TEST.findall("| x | `tests/a/test_b.py::test_c`, `tests/d.py` |") == [
        ("tests/a/test_b.py", "test_c"),
        ("tests/d.py", ""),
    ]
