"""Readers: the files a trace comes from, told apart by their first line.

    Mooncake-style JSONL   timestamp (ms), input_length, hash_ids, optional session     here
    kvtier's recordings    JSONL with a header line                                     recording.py
    vLLM's KV events       CSV                                                          vllm_events.py

All of them plain or gzip. What is wrong with a file is said with its line and the fix; nothing is skipped
silently.
"""

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .lines import Progress, is_number, lines_of, parse
from .recording import HEADER_KEY, read_recording
from .traces import SessionHint, Trace, TraceBuilder, TraceError, TraceNamespace
from .vllm_events import read_vllm_events

MOONCAKE_BLOCK_TOKENS = 512


def read_trace(path: Path, block_tokens: int = 0, progress: Progress | None = None) -> Trace:
    """Read a trace, whichever format it is in. `block_tokens` 0: what the file says, else 512.

    Raises TraceError, which names the line and the fix; OSError when the file cannot be opened.
    """
    lines = lines_of(path, progress)
    first = next(lines, None)
    if first is None:
        raise TraceError(path, 0, "the file is empty")
    number, line = first
    everything = itertools.chain([first], lines)
    if not line.lstrip().startswith(("{", "[")):
        return read_vllm_events(everything, path, block_tokens)
    if HEADER_KEY in parse(line, path, number):
        return read_recording(everything, path)
    return read_mooncake(everything, path, block_tokens)


def read_mooncake(lines: Iterable[tuple[int, str]], path: Path, block_tokens: int) -> Trace:
    """Read a JSONL trace as the Mooncake release has it (FAST'25).

    A request without a session is one of its own, as a runtime that knows no sessions names it; when it is
    over its session waits, and says how many tokens were decoded.
    """
    tokens = block_tokens or MOONCAKE_BLOCK_TOKENS
    builder = TraceBuilder(path.name, path)
    builder.add_namespace(TraceNamespace(tokens))
    for number, line in lines:
        request = parse(line, path, number)
        at_ms, num_tokens, ids = _mooncake_fields(request, path, number)
        fits = (num_tokens // tokens, -(-num_tokens // tokens))
        if len(ids) not in fits:
            message = (
                f"{len(ids)} hash_ids for {num_tokens} tokens; blocks of {tokens} tokens would be {fits[1]}; "
                "name the trace's block size with --block-tokens"
            )
            raise TraceError(path, number, message)
        session = request.get("session")
        num_decoded = request.get("output_length", 0)
        if type(num_decoded) is not int or num_decoded < 0:
            raise TraceError(path, number, f"output_length is {num_decoded!r}; it is a number of tokens")
        builder.add(
            at_ms / 1000,
            ids,
            num_tokens=num_tokens,
            num_asked=len(ids),
            num_filled=len(ids),
            session=f"request-{number}" if session is None else str(session),
            hint=SessionHint(num_decoded_tokens=num_decoded),
            line=number,
        )
    return builder.build()


def _mooncake_fields(request: dict[str, Any], path: Path, number: int) -> tuple[float, int, list[Any]]:
    """Return (timestamp in ms, input_length, hash_ids), checked."""
    for name in ("timestamp", "input_length", "hash_ids"):
        if name not in request:
            raise TraceError(path, number, f"no {name!r}; a request has timestamp, input_length, hash_ids")
    at_ms, num_tokens, ids = request["timestamp"], request["input_length"], request["hash_ids"]
    if not is_number(at_ms) or at_ms < 0:
        raise TraceError(path, number, f"timestamp is {at_ms!r}; it is a number of milliseconds, not below 0")
    if type(num_tokens) is not int or num_tokens < 0:
        raise TraceError(path, number, f"input_length is {num_tokens!r}; it is a number of tokens")
    if not isinstance(ids, list) or not set(map(type, ids)) <= {int, str}:
        raise TraceError(path, number, "hash_ids is a list of one number or text per block")
    return at_ms, num_tokens, ids
