"""Readers: the files a trace comes from, told apart by their first line.

    request traces         JSONL, a request a line           request_lines.py
    kvtier's recordings    JSONL with a header line          recording.py

All of them plain or gzip. What is wrong with a file is said with its line and the fix; nothing is skipped
silently.
"""

import itertools
from pathlib import Path

from .lines import Progress, lines_of, parse
from .recording import HEADER_KEY, read_recording
from .request_lines import dialect_of, read_requests
from .traces import Trace, TraceError


def read_trace(
    path: Path, block_tokens: int = 0, progress: Progress | None = None, content_ids: bool = False
) -> Trace:
    """Read a trace, whichever format it is in. `block_tokens` 0: what its format says.

    With `content_ids` the ids of a request trace name blocks without what stands before them.

    Raises TraceError, which names the line and the fix; OSError when the file cannot be opened.
    """
    lines = lines_of(path, progress)
    first = next(lines, None)
    if first is None:
        raise TraceError(path, 0, "the file is empty")
    number, line = first
    everything = itertools.chain([first], lines)
    request = parse(line, path, number)
    if HEADER_KEY in request:
        return read_recording(everything, path)
    return read_requests(everything, path, dialect_of(request), block_tokens, content_ids)
