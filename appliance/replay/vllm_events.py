"""vLLM's KV events as a trace: a CSV of what its own cache stored.

vLLM publishes what its cache stored and removed (`vllm/distributed/kv_events.py`), not what was asked: a
request that found everything leaves no event. A BlockStored event says that blocks were computed after
`parent_block_hash`, so that chain was in use then; it becomes a request for the whole chain. Events that
continue the same chain within CONTINUES_S (a prefill in chunks, then decoding) are one request. Removals
are left out: what vLLM's own cache gave up is what a larger one behind it would still have.
"""

import csv
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from .traces import Trace, TraceBuilder, TraceError, TraceNamespace

#: A stored event this long after the one before it is a new turn, not more of the same answer.
CONTINUES_S = 5.0
COLUMNS = ("timestamp", "event", "block_hashes", "parent_block_hash", "block_size")
#: Ways to write that there is no block before.
NO_PARENT = ("", "None", "null")
MAX_FIELD_BYTES = 1 << 30  # the hashes of a long prompt; the csv module stops at 128 KiB by itself


def read_vllm_events(lines: Iterable[tuple[int, str]], path: Path, block_tokens: int = 0) -> Trace:
    """Read a CSV with COLUMNS. Raises TraceError.

    These are: seconds, BlockStored or another event, hashes separated by spaces, the hash before them or
    nothing, tokens per block.
    """
    number = 0

    def texts() -> Iterator[str]:
        nonlocal number
        for where, line in lines:
            number = where
            yield line

    field_size_limit = csv.field_size_limit(MAX_FIELD_BYTES)
    try:
        return _read_rows(csv.DictReader(texts(), skipinitialspace=True), path, block_tokens, lambda: number)
    except csv.Error as error:
        raise TraceError(path, number, f"no CSV: {error}") from error
    finally:
        csv.field_size_limit(field_size_limit)


def _read_rows(rows: "csv.DictReader[str]", path: Path, block_tokens: int, line: Callable[[], int]) -> Trace:
    missing = [name for name in COLUMNS if name not in (rows.fieldnames or ())]
    if missing:
        message = f"no column {', '.join(missing)}; neither JSONL nor a CSV with {', '.join(COLUMNS)}"
        raise TraceError(path, line(), message)
    events = _Events(path, block_tokens)
    for row in rows:
        if row["event"] is None:
            raise TraceError(path, line(), "a row without an event; is the file whole?")
        if row["event"] == "BlockStored":
            events.stored(row, line())
    return events.build()


@dataclass(slots=True)
class _EventRequest:
    """Stored events that continue one another."""

    at_s: float
    last_s: float
    chain: list[str]
    line: int


class _Events:
    """Turns stored events into requests for chains."""

    def __init__(self, path: Path, block_tokens: int) -> None:
        self._path = path
        self._block_tokens = block_tokens
        self._parent: dict[str, str] = {}
        self._requests: list[_EventRequest] = []
        self._open: dict[str, _EventRequest] = {}  # by the last block of its chain

    def stored(self, row: dict[str, str], line: int) -> None:
        """Take in one event. Raises TraceError."""
        try:
            at_s, tokens = float(row["timestamp"]), int(row["block_size"])
        except (TypeError, ValueError) as error:
            raise TraceError(self._path, line, f"timestamp or block_size: {error}") from error
        if not math.isfinite(at_s):
            raise TraceError(self._path, line, f"timestamp is {at_s}; it is a number of seconds")
        if tokens <= 0 or self._block_tokens not in (0, tokens):
            message = f"block_size is {tokens}"
            message += f", was {self._block_tokens} before" if self._block_tokens else ""
            message += "; one file, one block size above 0"
            raise TraceError(self._path, line, message)
        self._block_tokens = tokens
        hashes = (row["block_hashes"] or "").split()
        if not hashes:
            raise TraceError(self._path, line, "block_hashes is empty; separate several by spaces")
        before = row["parent_block_hash"] or ""
        before = "" if before in NO_PARENT else before
        for parent, block in zip([before, *hashes], hashes, strict=False):
            self._parent[block] = parent
        self._extend(at_s, before, hashes, line)

    def _extend(self, at_s: float, before: str, hashes: list[str], line: int) -> None:
        request = self._open.pop(before, None) if before else None
        if request is not None and at_s - request.last_s <= CONTINUES_S:
            request.chain += hashes
            request.last_s = at_s
        else:
            request = _EventRequest(at_s, at_s, self._past(before) + hashes, line)
            self._requests.append(request)
        self._open[hashes[-1]] = request

    def _past(self, block: str) -> list[str]:
        """Return the chain up to `block`, as far back as its events are in the file."""
        chain: dict[str, None] = {}
        while block and block not in chain:
            chain[block] = None
            block = self._parent.get(block, "")
        return list(chain)[::-1]

    def build(self) -> Trace:
        """Return the trace. Raises TraceError."""
        builder = TraceBuilder(self._path.name, self._path)
        builder.add_namespace(TraceNamespace(self._block_tokens))
        for request in self._requests:
            count = len(request.chain)
            num_tokens = count * self._block_tokens
            builder.add(
                request.at_s,
                request.chain,
                num_tokens=num_tokens,
                num_asked=count,
                num_filled=count,
                line=request.line,
            )
        return builder.build()
