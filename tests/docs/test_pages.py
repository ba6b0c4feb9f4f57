"""The pages keep their word: commands run, pages are in the site's contents, links lead somewhere."""

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from .commands import PageSession, can_isolate, commands_of, is_seen

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
#: By name, not by folder: other pages install packages, make users, start services.
RUN = (
    "quickstart",
    "reference/policies",
    *(
        f"operate/{page}"
        for page in (
            "certificates",
            "encryption",
            "health",
            "memory",
            "object-store",
            "sizing",
            "troubleshooting",
            "upgrade",
        )
    ),
)
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


@pytest.fixture
def session() -> Iterator[PageSession]:
    if not can_isolate():
        pytest.skip("this user may not make namespaces (unshare)")
    with tempfile.TemporaryDirectory(prefix="kv") as folder:  # a short name: no line is folded at it
        session = PageSession(Path(folder))
        try:
            yield session
        finally:
            session.close()


@pytest.mark.parametrize("name", RUN)
def test_the_commands_of_a_page_do_what_it_says(name: str, session: PageSession) -> None:
    page = DOCS / f"{name}.md"
    for command in commands_of(page.read_text()):
        if command.why_not:
            continue
        status, printed = session.run(command)
        assert status == command.status, f"{page.name}:\n{command.text}\nended with {status}:\n{printed}"
        for line in command.shown:
            assert is_seen(line, printed), f"{page.name}:\n{command.text}\n{line!r} is not in:\n{printed}"


def test_what_must_be_seen_is_missed_when_it_is_not_there() -> None:
    page = "<!-- fails: 2 -->\n```sh\nfalse\n```\n\n```text\none … three\n```\n"
    (command,) = commands_of(page)
    assert (command.status, command.shown) == (2, ["one … three"])
    assert is_seen("one … three", "x\none  two three\n")
    assert not is_seen("one … three", "one\nthree\n")
    assert not is_seen("1.5", "125")


def _named(contents: object) -> Iterator[str]:
    if isinstance(contents, str):
        yield contents
    elif isinstance(contents, dict | list):
        for part in contents.values() if isinstance(contents, dict) else contents:
            yield from _named(part)


def test_every_page_is_in_the_contents_once() -> None:
    # `!!python/name` of the plug-ins is not for us to load
    text = re.sub(r"!!\S+", "", (ROOT / "mkdocs.yml").read_text())
    named = sorted(_named(yaml.safe_load(text)["nav"]))
    assert named == sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))


@pytest.mark.parametrize(
    "page", sorted(DOCS.rglob("*.md")), ids=lambda page: page.relative_to(DOCS).as_posix()
)
def test_links_lead_somewhere(page: Path) -> None:
    links = [link for link in LINK.findall(page.read_text()) if "://" not in link]
    assert [link for link in links if not (page.parent / link).exists()] == []
