"""Text to train and to measure on: the Python sources of this machine.

Every machine that runs this has the standard library and torch, in the same versions where requirements are
pinned; nothing is fetched. Files are shared out by a hash of their name, so that training, calibration and
held-out text never have a file in common, whatever else is installed. Long tables of data and generated code
are left out: a model that learns `encodings/cp437.py` by heart has a perplexity that says nothing.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, TypeAlias

Part: TypeAlias = Literal["train", "calibrate", "heldout"]

PACKAGES = ("torch", "transformers", "numpy")
MAX_FILE_CHARACTERS = 60_000
DATA = (
    "encodings/",
    "_pb2",
    "pydoc_data",
    "lib2to3/tests",
    "cjkencodings",
    "/_sysconfigdata",
    "test/test_uni",
)
SHARES: dict[Part, range] = {"train": range(18), "calibrate": range(18, 19), "heldout": range(19, 20)}
NUM_SHARES = 20


def _roots() -> Iterator[Path]:
    yield Path(sysconfig.get_paths()["stdlib"])
    for package in PACKAGES:
        found = importlib.util.find_spec(package)
        if found is not None and found.origin is not None:
            yield Path(found.origin).parent


def _files(part: Part) -> list[tuple[bytes, Path]]:
    """Return (order, path) of the files of `part`, in an order that depends on their names only."""
    found = []
    for root in _roots():
        for path in root.rglob("*.py"):
            name = f"{root.name}/{path.relative_to(root).as_posix()}"
            if "site-packages" in name or any(part in name for part in DATA):
                continue
            order = hashlib.sha256(name.encode()).digest()
            if order[0] % NUM_SHARES in SHARES[part]:
                found.append((order, path))
    return sorted(found)


def text(part: Part, num_characters: int) -> str:
    """Return about `num_characters` of the text of one part, always the same on the same installation."""
    pieces: list[str] = []
    length = 0
    for _, path in _files(part):
        if length >= num_characters:
            break
        piece = path.read_text("utf-8", errors="ignore")[:MAX_FILE_CHARACTERS]
        if len(piece) > 1000 and piece.isascii():
            pieces.append(piece)
            length += len(piece)
    return "\n\n".join(pieces)[:num_characters]
