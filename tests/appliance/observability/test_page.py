"""The page as files: small, whole, harmless, true to the documented value. tests/web opens it in Chromium."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from kvtier.appliance.observability.web import PAGE

from ...generated import ROOT
from .conftest import Start

MAX_BYTES = 64_000
FILES = {path.name: path.read_text() for path in sorted(PAGE.iterdir())}
SCRIPTS = {name: text for name, text in FILES.items() if name.endswith(".js")}
HTML, CSS = FILES["index.html"], FILES["page.css"]
VALUE = json.loads((ROOT / "docs" / "web-api.md").read_text().split("```json")[1].split("```")[0])
NAMED = {"session": {"name"}, "decision": {"block", "next_block"}}  # with observe.names
#: What a variable of this name stands for, in every script.
MEANT: dict[str, dict[str, Any]] = {
    **{
        key: VALUE[key]
        for key in ("totals", "prefetch", "counts", "sessions", "history", "policy", "source", "fleet")
    },
    "snapshot": VALUE,
    "host": VALUE["fleet"]["hosts"][0],
    "tier": VALUE["tiers"][0],
    "edge": VALUE["edges"][0],
    "codec": VALUE["codecs"][0],
    "session": VALUE["sessions"]["latest"][0],
    "decision": VALUE["decisions"][0],
}


def fields(text: str) -> Iterator[tuple[str, str]]:
    """Yield (variable, field) wherever a script reads a part of the snapshot."""
    names = "|".join(MEANT)
    for match in re.finditer(rf"(?<![\w.\"'/-])({names})\??\.(\w+)", text):
        yield match[1], match[2]
    for match in re.finditer(rf"const \{{([^}}]*)\}} = ({names});", text):
        for part in match[1].split(","):
            yield match[2], part.split(":")[0].strip()


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_field_that_is_read_is_in_the_value(script: str) -> None:
    unknown = [
        f"{name}.{field}"
        for name, field in fields(SCRIPTS[script])
        if field not in MEANT[name].keys() | NAMED.get(name, set())
    ]
    assert unknown == []


def test_fields_are_found_where_they_are_read() -> None:
    found = {pair for text in SCRIPTS.values() for pair in fields(text)}
    assert {("tier", "used_bytes"), ("snapshot", "edges"), ("decision", "next_price")} <= found
    assert len(found) > 60


def test_it_is_small() -> None:
    assert sum(len(text.encode()) for text in FILES.values()) < MAX_BYTES
    assert [name for name, text in FILES.items() if text.count("\n") > 500] == []


@pytest.mark.parametrize("name", FILES)
def test_nothing_comes_from_elsewhere(name: str) -> None:
    places = re.findall(r"(?:https?:)?//[\w.-]+\.\w+", re.sub(r"^\s*//.*", "", FILES[name], flags=re.M))
    assert [place for place in places if place != "http://www.w3.org"] == []
    assert "@import" not in FILES[name]


@pytest.mark.parametrize(
    "pattern",
    [
        *("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", r"\beval\b", r"new Function"),
        *("DOMParser", r"setAttribute\(\"on", "javascript:", r"\bstyle:", r"\.href\b"),
    ],
)
def test_no_text_becomes_markup(pattern: str) -> None:
    assert [name for name, text in SCRIPTS.items() if re.search(pattern, text)] == []


def test_the_document_has_nothing_inline() -> None:
    assert re.findall(r"<script(?![^>]*\bsrc=)", HTML) == []
    assert re.findall(r"<style|\sstyle=|\son\w+=", HTML) == []


def test_all_that_is_named_is_there() -> None:
    ids = set(re.findall(r'\bid="([\w-]+)"', HTML))
    assert len(ids) == HTML.count(' id="'), "an id is given twice"
    wanted = {name for text in SCRIPTS.values() for name in re.findall(r"\bput\(\s*\"([\w-]+)\"", text)}
    wanted |= {name for text in SCRIPTS.values() for name in re.findall(r"ById\(\"([\w-]+)\"\)", text)}
    wanted |= {name for text in SCRIPTS.values() for name in re.findall(r"Selector\(\"#([\w-]+)", text)}
    wanted |= {
        name
        for _, names in re.findall(r"aria-(labelledby|describedby)=\"([^\"]+)", HTML)
        for name in names.split()
    }
    assert wanted - ids == set()
    files = set(re.findall(r'(?:href|src)="/([\w.]+)"', HTML))
    files |= {name for text in SCRIPTS.values() for name in re.findall(r"from \"\./([\w.]+)\"", text)}
    assert files | {"index.html"} == set(FILES)


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_scripts_are_javascript() -> None:
    for name in SCRIPTS:
        checked = subprocess.run(
            ["node", "--input-type=module", "--check"],
            input=SCRIPTS[name],
            text=True,
            capture_output=True,
            check=False,
        )
        assert checked.returncode == 0, f"{name}: {checked.stderr}"


def palettes() -> Iterator[dict[str, str]]:
    """Yield the colours for light and for dark, by name."""
    light, dark = re.findall(r":root \{(.*?)\}", CSS, re.S)
    found = dict(re.findall(r"--([\w-]+): (#\w+);", light))
    yield found
    yield found | dict(re.findall(r"--([\w-]+): (#\w+);", dark))


def contrast(one: str, other: str) -> float:
    """Return the contrast ratio of two colours, 1 to 21 (WCAG 2.2, relative luminance)."""

    def luminance(colour: str) -> float:
        digits = colour[1:] if len(colour) == 7 else "".join(digit * 2 for digit in colour[1:])
        parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize("palette", list(palettes()), ids=["light", "dark"])
def test_words_can_be_read(palette: dict[str, str]) -> None:
    pairs = [(ink, paper) for ink in ("ink", "quiet", "bad") for paper in ("paper", "card")]
    pairs += [(word, f"{word}-paper") for word in ("good", "warn", "bad")]
    low = [(ink, paper) for ink, paper in pairs if contrast(palette[ink], palette[paper]) < 4.5]
    assert low == []


def test_the_daemon_serves_it_and_lets_nothing_else_in(start: Start) -> None:
    shown = start()
    policy = shown.header("/", "Content-Security-Policy")
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    assert "require-trusted-types-for 'script'" in policy
    for name, text in FILES.items():
        path = "/" if name == "index.html" else f"/{name}"
        assert shown.get(path) == text
        kind = {"html": "text/html", "css": "text/css", "js": "javascript", "svg": "image/svg"}[
            name.rpartition(".")[2]
        ]
        assert kind in shown.header(path, "Content-Type")
