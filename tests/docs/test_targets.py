"""The targets of the Makefile: CONTRIBUTING.md has each of them, and `make test-all` every one that tests."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MAKEFILE = (ROOT / "Makefile").read_text()


def phony() -> set[str]:
    """Return the targets that are no files."""
    [line] = re.findall(r"(?m)^\.PHONY: (.*)$", MAKEFILE)
    return set(line.split())


def test_each_target_is_in_the_table_and_no_other() -> None:
    named = set(re.findall(r"`make ([a-z0-9-]+)[^`]*`", (ROOT / "CONTRIBUTING.md").read_text()))
    assert named == phony()


def test_what_is_no_file_is_declared_so() -> None:
    """A folder `dist` would otherwise be an up-to-date target, and `make dist` would do nothing."""
    heads = re.findall(r"(?m)^([a-z][a-z0-9 -]*):(?!=)", MAKEFILE)
    assert {name for head in heads for name in head.split()} == phony()


def test_all_tests_are_run_by_test_all() -> None:
    [everything] = re.findall(r"(?m)^EVERYTHING := (.*)$", MAKEFILE)
    take_hours = {"test-matrix", "test-aarch64"}
    tests = {name for name in phony() if name.startswith("test")} - {"test-all", *take_hours}
    assert set(everything.split()) == {"check", "compiled", *tests}
