"""The blocking client's source, made from the asyncio one: `clients/sync/` from `clients/aio/`.

    python -m tests.generated --write

Works on tokens, so that layout and comments survive: drops `async` and `await`, renames `AsyncLease` to
`Lease` and the asynchronous protocols (`__aenter__`, `AsyncIterator`) to the blocking ones, also in texts.
Then ruff formats it and sorts its imports. Rejected: the package `unasync`, which does the first half: one
more dependency to pin for forty lines.
"""

import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MODULES = ("client.py", "handles.py", "pages.py")
HEADER = "# Generated from clients/aio/{name} by `make docs`. Change that file, not this one.\n"
_WITHOUT_TEXT = (tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)  # indentation comes with what follows
_RENAMED = {"__aenter__": "__enter__", "__aexit__": "__exit__", "__aiter__": "__iter__"}
_DROPPED = ("async", "await")


def blocking(source: str) -> str:
    """Return the blocking form of an asynchronous module's source, unformatted."""
    lines = source.splitlines(keepends=True)
    made: list[str] = []
    line, column = 1, 0
    for token in tokenize.generate_tokens(StringIO(source).readline):
        if token.type in _WITHOUT_TEXT:
            continue
        made.append(_between(lines, (line, column), token.start))
        line, column = token.end
        if token.type == tokenize.NAME and token.string in _DROPPED:
            column += 1  # the space behind it
        elif token.type == tokenize.NAME:
            made.append(_name(token.string))
        elif token.type == tokenize.STRING:
            made.append(_words(token.string))
        else:
            made.append(token.string)
    return "".join(made)


def sync_modules() -> Iterator[tuple[Path, bytes]]:
    """Yield (path, content) of the generated modules of clients/sync."""
    for name in MODULES:
        path = ROOT / "clients" / "sync" / name
        source = (ROOT / "clients" / "aio" / name).read_text()
        made = HEADER.format(name=name) + blocking(source)
        made = _ruff(path, made, "check", "--select=I,UP028", "--fix", "--unsafe-fixes")
        yield path, _ruff(path, made, "format").encode()


def _name(name: str) -> str:
    return _RENAMED.get(name, re.sub(r"^Async(?=[A-Z])", "", name))


def _words(text: str) -> str:
    """Return a docstring, or an annotation in quotes, of the blocking form."""
    without = re.sub(r"\b(async|await) ", "", text)
    return re.sub(r"\bAsync(?=[A-Z])", "", without)


def _between(lines: list[str], start: tuple[int, int], end: tuple[int, int]) -> str:
    """Return the text from `start` to `end`, (line, column) pairs as tokenize counts them."""
    if start[0] == end[0]:
        return lines[start[0] - 1][start[1] : end[1]]
    whole = "".join(lines[start[0] : end[0] - 1])
    return lines[start[0] - 1][start[1] :] + whole + lines[end[0] - 1][: end[1]]


def _ruff(path: Path, text: str, *arguments: str) -> str:
    command = [sys.executable, "-m", "ruff", *arguments, "--quiet", "--stdin-filename", str(path), "-"]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=True, cwd=ROOT).stdout
