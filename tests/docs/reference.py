"""The Python reference, read as text: which names its pages describe, and the examples that stand there."""

import doctest
import re
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = sorted((DOCS / "reference").glob("*.md"))
#: Pages elsewhere that have sessions.
OTHERS = [DOCS / "prefix-hash.md"]
DIRECTIVE = re.compile(r"^::: ([\w.]+)$", re.M)
SESSION = re.compile(r"^```pycon\n(.*?)^```$", re.M | re.S)
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE | doctest.IGNORE_EXCEPTION_DETAIL


def described(page: str) -> dict[str, str]:
    """Return what a page says about each name it describes, up to the next one."""
    parts = DIRECTIVE.split(page)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def failures(name: str, page: str) -> list[str]:
    """Run the Python sessions of a page, one after the other; return what came out otherwise."""
    found: list[str] = []
    known: dict[str, object] = {}
    runner = doctest.DocTestRunner(verbose=False, optionflags=FLAGS)
    for session in SESSION.finditer(page):
        line = page.count("\n", 0, session.start(1))
        test = doctest.DocTestParser().get_doctest(session[1], known, name, name, line)
        assert test.examples, f"{name}:{line}: a session without a prompt"
        test.globs = known  # not a copy: functions of earlier sessions see what later ones assign
        runner.run(test, clear_globs=False, out=found.append)
    return found
