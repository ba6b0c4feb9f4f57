"""docs/extending.md keeps its word: its diffs pass the contract suites, its tables name all files."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "extending.md"
PRODUCT = ("appliance", "clients", "native", "policies", "sources", "tiers", "proto")
TABLE_ROW = re.compile(r"^\| `([^`]+)` \| `([^`]+)` \|", re.MULTILINE)


class Hunk(NamedTuple):
    """Lines of a file before and after a change; `before` is empty for a new file."""

    path: str
    before: str
    after: str


def section_of(title: str) -> str:
    """Return the text of one section of the page."""
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


def hunks_of(section: str) -> Iterator[Hunk]:
    """Yield the changes of a section's diff."""
    found = re.search(r"```diff\n(.*?)```", section, re.DOTALL)
    assert found is not None
    for file in re.split(r"^--- .*\n", found[1], flags=re.MULTILINE)[1:]:
        header, *hunks = re.split(r"^@@ .*\n", file, flags=re.MULTILINE)
        path = header.removeprefix("+++ b/").strip()
        for hunk in hunks:
            lines = hunk.splitlines(keepends=True)
            before = "".join(line[1:] for line in lines if line[0] in " -")
            yield Hunk(path, before, "".join(line[1:] for line in lines if line[0] in " +"))


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the source, with the diffs of the page applied."""
    copied = tmp_path_factory.mktemp("extended")
    ignored = shutil.ignore_patterns("__pycache__", "node_modules", "*.so")
    for name in (*PRODUCT, "src", "tests"):
        shutil.copytree(ROOT / name, copied / name, symlinks=True, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", copied)
    for title in ("A policy", "An exact codec"):
        for path, before, after in hunks_of(section_of(title)):
            if before:
                text = (copied / path).read_text()
                assert text.count(before) == 1, f"{path}: the page's context is not there once: {before!r}"
                (copied / path).write_text(text.replace(before, after))
            else:
                assert not (copied / path).exists(), f"{path} is not new"
                (copied / path).write_text(after)
    return copied


@pytest.mark.parametrize(
    ("suite", "name"),
    [("test_policies.py", "deepest"), ("test_codecs.py", "deflate")],
    ids=["policy", "codec"],
)
def test_the_example_of_the_page_passes_the_contract_suite(suite: str, name: str, copy: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", name]
    command += ["-W", "default", f"tests/contracts/{suite}"]
    environment = {**os.environ, "PYTHONPATH": f"{copy / 'src'}:{copy}"}
    ended = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-2000:]
    assert re.search(r"\b[1-9]\d* passed", ended.stdout)


def test_the_example_codec_can_be_configured_and_streams_use_it(copy: Path) -> None:
    code = (
        "from kvtier.appliance.config.compression import CompressionSettings\n"
        "from kvtier.tiers.codecs.registry import codec_of_record\n"
        "from kvtier.tiers.codecs.streaming import usable_codecs\n"
        "assert CompressionSettings(codec='deflate').codec == 'deflate'\n"
        "assert 'deflate' in [codec_of_record(one, b'').name for one in usable_codecs()]\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(copy / "src")}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("title", ["A policy", "An exact codec"])
def test_a_policy_or_a_codec_touches_two_files(title: str) -> None:
    assert len({hunk.path for hunk in hunks_of(section_of(title))}) == 2


@pytest.mark.parametrize(
    ("title", "names"),
    [
        (
            "An RPC",
            r"ForkSession|FORK_SESSION|SessionForked|async def fork\(",
        ),
        ("A setting", r"max_pinned\b|max_pinned_fraction: "),
    ],
)
def test_a_table_names_all_files_that_a_change_touches(title: str, names: str) -> None:
    rows = TABLE_ROW.findall(section_of(title))
    for path, line in rows:
        assert line in (ROOT / path).read_text(), f"{path} has no {line!r}"
    found = set()
    for folder in PRODUCT:
        for path in (ROOT / folder).rglob("*"):
            is_generated = "_pb2" in path.name or path.is_relative_to(ROOT / "clients" / "sync")
            if path.suffix in (".py", ".proto") and not is_generated and re.search(names, path.read_text()):
                found.add(path.relative_to(ROOT).as_posix())
    assert found == {path for path, _ in rows}


def test_the_summary_counts_the_files_of_each_section() -> None:
    summary = dict(re.findall(r"^\| \[an? ([^\]]+)\]\([^)]*\) \| (\d+)", PAGE.read_text(), re.MULTILINE))
    for title in ("A policy", "An exact codec"):
        count = len({hunk.path for hunk in hunks_of(section_of(title))})
        assert int(summary[title.split(" ", 1)[1]]) == count
    for title in ("An RPC", "A setting"):
        assert int(summary[title.split(" ", 1)[1]]) == len(TABLE_ROW.findall(section_of(title)))


def test_the_files_of_a_tier_kind_are_there() -> None:
    section = section_of("A tier kind")
    paths = re.findall(r"`([\w/]+\.(?:py|toml))`", section)
    assert len(paths) >= 5
    assert [path for path in paths if not (ROOT / path).exists()] == []
