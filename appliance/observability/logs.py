"""Logs: one line an event, for people or as JSON, and nothing in it that is not ours to tell.

An allow-list, in three parts. What a line says is the template in our source; of its arguments numbers and
words of ours are filled in, everything else only as its type. Text is cut and what looks like a hash, key or
token is shortened. Of an exception the type and our own frames are told; its message only when our own code
raised it, for other libraries put their input into theirs. Lines of other libraries are cut after the first.

structlog was rejected: twenty log calls need no pipeline, and the rules below are the part that matters.
"""

import json
import logging
import re
import sys
import traceback
from datetime import UTC, datetime
from enum import Enum
from pathlib import PurePath
from types import TracebackType
from typing import Any

OURS = "kvtier"
MAX_TEXT = 300
MAX_FOREIGN_TEXT = 120
#: Fields that may be given with `extra=`.
FIELDS = frozenset(
    {"tier", "edge", "lease", "generation", "method", "code", "segment", "num_blocks", "seconds"}
)

_HEX = re.compile(r"[0-9a-fA-F]{16,}")
_TOKEN = re.compile(r"[A-Za-z0-9+_=-]{32,}")


def clean(text: str, limit: int = MAX_TEXT) -> str:
    """Return text without what looks like a hash, a key or a token, on one line, cut."""
    text = _HEX.sub(lambda match: f"{match[0][:8]}…", " ".join(text.split()))
    text = _TOKEN.sub("…", text)
    return text if len(text) <= limit else f"{text[:limit]}…"


def safe(value: object) -> object:
    """Return what may be said of an argument."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, Enum):
        return value.name.lower()
    if isinstance(value, str | PurePath):
        return clean(str(value))
    if isinstance(value, BaseException):
        return describe(value)
    if isinstance(value, dict):
        return {str(safe(key)): safe(item) for key, item in value.items()}
    return f"<{type(value).__name__}>"


def describe(problem: BaseException) -> str:
    """Return the type of an exception, and its message when our own code wrote that."""
    name = type(problem).__name__
    if isinstance(problem, OSError) and problem.strerror:
        return f"{name}: {problem.strerror}"
    frames = traceback.extract_tb(problem.__traceback__)
    is_ours = not frames or _is_ours(problem.__traceback__)
    return f"{name}: {clean(str(problem))}" if is_ours and str(problem) else name


def message(record: logging.LogRecord) -> str:
    """Return what a record says, with what may be said of its arguments."""
    template = str(record.msg)
    if not _is_of_ours(record.name):
        return clean(template.partition("\n")[0], MAX_FOREIGN_TEXT)
    if not record.args:
        return clean(template)
    if isinstance(record.args, dict):
        return clean(template % {key: safe(value) for key, value in record.args.items()})
    return clean(template % tuple(map(safe, record.args)))


def frames(trace: TracebackType | None) -> list[str]:
    """Return where an exception came from: file, line, function; no source, no values."""
    return [f"{PurePath(f.filename).name}:{f.lineno} {f.name}" for f in traceback.extract_tb(trace)]


class TextFormatter(logging.Formatter):
    """For people."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one line, and one per frame of an exception."""
        at = datetime.fromtimestamp(record.created, UTC).strftime("%Y-%m-%d %H:%M:%S,%f")[:-3]
        lines = [f"{at} {record.levelname} {record.name}: {message(record)}"]
        if record.exc_info and record.exc_info[1] is not None:
            lines[0] += f" ({describe(record.exc_info[1])})"
            lines += [f"    {frame}" for frame in frames(record.exc_info[2])]
        return "\n".join(lines)


class JsonFormatter(logging.Formatter):
    """For programs: one object a line, of these fields and no others."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one line."""
        entry: dict[str, Any] = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "severity": record.levelname.lower(),
            "logger": record.name,
            "message": message(record),
        }
        entry |= {key: safe(value) for key, value in vars(record).items() if key in FIELDS}
        if record.exc_info and record.exc_info[1] is not None:
            entry["error"] = describe(record.exc_info[1])
            entry["frames"] = frames(record.exc_info[2])
        return json.dumps(entry, ensure_ascii=False)


def configure(form: str) -> None:
    """Write the log of this process to stderr, as `text` or `json`."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)


def _is_of_ours(name: str) -> bool:
    return name == OURS or name.startswith(f"{OURS}.")


def _is_ours(trace: TracebackType | None) -> bool:
    """Whether the last frame of a traceback is code of this package."""
    last = None
    while trace is not None:
        last, trace = trace.tb_frame.f_globals.get("__name__", ""), trace.tb_next
    return last is not None and _is_of_ours(last)
