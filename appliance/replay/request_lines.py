"""Request traces: JSONL with a request a line, as services publish what they were asked.

    Mooncake (FAST'25)    timestamp in ms, blocks of 512 tokens, optional session
    Bailian (ATC'25)      timestamp in s, blocks of 16 tokens, chat_id and parent_chat_id
    kvcache-simulator     block_size in every line; without a timestamp, in the order of the file

Ids of a trace name a block and everything before it, or only what the block holds. KV depends on what stands
before it, so the second kind is chained here; kvcache-simulator chains all. A Mooncake-style file does not
say which kind it has: one that breaks the first rule is refused rather than guessed about.
"""

from collections.abc import Hashable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .lines import are_names, is_count, is_number, parse
from .traces import SessionHint, Trace, TraceBuilder, TraceError, TraceNamespace

CHAT_KEY = "chat_id"
SIZE_KEY = "block_size"
#: Between requests of a file without times.
STEP_MS = 1000.0


class Dialect(NamedTuple):
    """What the fields of a family of traces mean."""

    time_unit: str
    time_unit_s: float
    block_tokens: int
    has_content_ids: bool
    has_block_size: bool = False  # in every line


MOONCAKE = Dialect("milliseconds", 1e-3, 512, has_content_ids=False)
BAILIAN = Dialect("seconds", 1.0, 16, has_content_ids=True)


def simulator_dialect(block_tokens: int) -> Dialect:
    """Return the dialect of files that name their block size in every line."""
    return Dialect("milliseconds", 1e-3, block_tokens, has_content_ids=True, has_block_size=True)


def dialect_of(request: dict[str, Any]) -> Dialect:
    """Return the dialect of a file, from its first request."""
    size = request.get(SIZE_KEY)
    if is_count(size) and size:
        return simulator_dialect(size)
    return BAILIAN if CHAT_KEY in request else MOONCAKE


def read_requests(
    lines: Iterable[tuple[int, str]],
    path: Path,
    dialect: Dialect = MOONCAKE,
    block_tokens: int = 0,
    content_ids: bool = False,
) -> Trace:
    """Read a request trace. `block_tokens` 0: the dialect's.

    With `content_ids` ids name blocks without what stands before them.

    A request without a session is one of its own, as a runtime that knows no sessions names it; when it is
    over its session waits, and says how many tokens were decoded. Raises TraceError.
    """
    tokens = block_tokens or dialect.block_tokens
    builder = TraceBuilder(path.name, path, "when yours name only what it holds, --content-ids")
    builder.add_namespace(TraceNamespace(tokens))
    sessions = _Sessions()
    chains = _Chains() if content_ids or dialect.has_content_ids else None
    for number, line in lines:
        request = parse(line, path, number)
        if dialect.has_block_size:
            _check_size(request, tokens, path, number)
            request.setdefault("timestamp", number * STEP_MS)
        at, num_tokens, ids, num_decoded = _fields(request, dialect, path, number)
        fits = (num_tokens // tokens, -(-num_tokens // tokens))
        if len(ids) not in fits:
            message = (
                f"{len(ids)} hash_ids for {num_tokens} tokens; blocks of {tokens} tokens would be {fits[1]}; "
                "name the trace's block size with --block-tokens"
            )
            raise TraceError(path, number, message)
        builder.add(
            at * dialect.time_unit_s,
            ids if chains is None else chains.names(ids),
            num_tokens=num_tokens,
            num_asked=len(ids),
            num_filled=len(ids),
            session=sessions.of(request, number),
            hint=SessionHint(num_decoded_tokens=num_decoded),
            line=number,
        )
    return builder.build()


class _Sessions:
    """Names the session of a request: what it says, the first chat of its conversation, or itself."""

    def __init__(self) -> None:
        self._first_chat: dict[Hashable, Hashable] = {}

    def of(self, request: dict[str, Any], number: int) -> str:
        if CHAT_KEY in request:
            chat, parent = str(request[CHAT_KEY]), str(request.get("parent_chat_id", -1))
            return f"chat-{self._first_chat.setdefault(chat, self._first_chat.get(parent, chat))}"
        session = request.get("session")
        return f"request-{number}" if session in (None, "") else str(session)


class _Chains:
    """Names blocks by what they hold and all that stands before them."""

    def __init__(self) -> None:
        self._names: dict[tuple[int, Hashable], int] = {}

    def names(self, ids: Sequence[Hashable]) -> list[int]:
        before, chain = -1, []
        for held in ids:
            before = self._names.setdefault((before, held), len(self._names))
            chain.append(before)
        return chain


def _check_size(request: dict[str, Any], block_tokens: int, path: Path, number: int) -> None:
    """Check that a line has the block size of the others. Raises TraceError."""
    size = request.get(SIZE_KEY, block_tokens)
    if size != block_tokens:
        message = f"block_size is {size!r}; a replay has blocks of one size, here {block_tokens} tokens"
        raise TraceError(path, number, message)
    if request.get("block_tokens") is not None:
        raise TraceError(
            path, number, "block_tokens is not read: only the last block may be shorter; remove it"
        )


def _fields(
    request: dict[str, Any], dialect: Dialect, path: Path, number: int
) -> tuple[float, int, list[Any], int]:
    """Return (timestamp, input_length, hash_ids, output_length), checked."""
    for name in ("timestamp", "input_length", "hash_ids"):
        if name not in request:
            raise TraceError(path, number, f"no {name!r}; a request has timestamp, input_length, hash_ids")
    at, num_tokens, ids = request["timestamp"], request["input_length"], request["hash_ids"]
    if not is_number(at) or at < 0:
        message = f"timestamp is {at!r}; it is a number of {dialect.time_unit}, not below 0"
        raise TraceError(path, number, message)
    if not is_count(num_tokens):
        raise TraceError(path, number, f"input_length is {num_tokens!r}; it is a number of tokens")
    if not isinstance(ids, list) or not are_names(ids):
        raise TraceError(path, number, "hash_ids is a list of one number or text per block")
    num_decoded = request.get("output_length", 0)
    if not is_count(num_decoded):
        raise TraceError(path, number, f"output_length is {num_decoded!r}; it is a number of tokens")
    return at, num_tokens, ids, num_decoded
