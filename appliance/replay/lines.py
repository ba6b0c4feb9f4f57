"""Lines of a trace file, plain or gzip, with their numbers: what every reader of text formats needs."""

import gzip
import io
import json
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from .traces import TraceError

GZIP_MAGIC = b"\x1f\x8b"
PROGRESS_LINES = 256
MAX_COUNT = 2**53

Progress = Callable[[int], None]  # bytes of the file read so far


def lines_of(path: Path, progress: Progress | None = None) -> Iterator[tuple[int, str]]:
    """Yield (number, line) of the lines that are not blank.

    Raises TraceError where a file breaks off, OSError when it cannot be opened.
    """
    number = 0
    with path.open("rb") as raw:
        is_gzip = raw.read(2) == GZIP_MAGIC
        raw.seek(0)
        binary = cast(BinaryIO, gzip.GzipFile(fileobj=raw)) if is_gzip else raw
        try:
            with io.TextIOWrapper(binary, encoding="utf-8-sig") as text:  # some editors mark their files
                for number, line in enumerate(text, 1):
                    if progress is not None and number % PROGRESS_LINES == 0:
                        progress(raw.tell())
                    if not line.isspace():
                        yield number, line
        except (EOFError, gzip.BadGzipFile, zlib.error, UnicodeDecodeError) as error:
            message = f"cannot be read on from here: {error}; is the file whole?"
            raise TraceError(path, number + 1, message) from error


def parse(line: str, path: Path, number: int) -> dict[str, Any]:
    """Return the JSON object in a line. Raises TraceError."""
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise TraceError(path, number, f"not JSON ({error.msg}); one object a line") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, lists in lists in lists
        raise TraceError(path, number, f"nothing that a trace holds: {error}") from error
    if not isinstance(value, dict):
        raise TraceError(path, number, f"{type(value).__name__} instead of an object; one object a line")
    return value


def is_number(value: object) -> bool:
    """Return whether this is a finite number, and not one of JSON's truth values."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return abs(value) <= sys.float_info.max  # false for NaN


def is_count(value: object) -> bool:
    """Return whether this is a whole number, not below 0, of which a float holds every one before it."""
    return type(value) is int and 0 <= value <= MAX_COUNT


def are_names(values: Iterable[object]) -> bool:
    """Return whether each of these can name a block."""
    return set(map(type, values)) <= {int, str}
