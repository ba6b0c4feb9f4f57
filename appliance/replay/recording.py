"""Recordings: the requests of a daemon, with times and sizes and without names of users or prompts.

JSON lines, gzip. A line for each namespace, then one per access:

    {"kvtier_recording": 1}
    {"namespace": 1, "block_tokens": 16, "block_bytes": 2097152}
    {"at": 0.512, "op": "ask", "namespace": 1, "session": "9f…", "blocks": ["4c…", …], "num_found": 3}
    {"at": 0.733, "op": "put", "namespace": 1, "session": "9f…", "parent": "c1…", "blocks": ["77…", …]}
    {"at": 0.8, "op": "session", "session": "9f…", "urgency": "waiting", "num_decoded_tokens": 212}
    {"at": 0.9, "lost": 12}

`at` is seconds since the recording began, not a date. Blocks and sessions are BLAKE2b of their names under
a key that is made for this recording and never written down (RFC 7693): equal names stay equal within the
file, and hashing guessed prompts does not show which prompt a block belongs to, not even to the recorder.
Rejected: the prefix hashes themselves, which anyone with the model's tokenizer can compute for a prompt they
suspect; numbers in order of appearance, for which the recorder would have to remember every
block.
"""

import hashlib
import json
import secrets
from collections.abc import Iterable, Sequence
from io import TextIOBase
from pathlib import Path
from typing import Any, TextIO

from ...tiers.block import Urgency
from .lines import are_names, is_count, is_number, parse
from .traces import SessionHint, Trace, TraceBuilder, TraceError, TraceNamespace

HEADER_KEY = "kvtier_recording"
FORMAT_VERSION = 1
NAME_BYTES = 8  # of a block's or session's name in the file: a billion blocks collide with 3 % chance
KEY_BYTES = 32
NEVER = float("inf")
MAX_BLOCK_TOKENS = 1 << 20  # no geometry has more
URGENCIES = {urgency.name.lower(): urgency for urgency in Urgency}


class Recorder:
    """Writes a recording, under a key that it makes and forgets."""

    def __init__(self, out: TextIO | TextIOBase) -> None:
        self._out = out
        self._key = secrets.token_bytes(KEY_BYTES)
        self._namespaces: set[int] = set()
        self._began_at: float | None = None
        self.num_accesses = 0
        self.num_lost = 0
        self._write({HEADER_KEY: FORMAT_VERSION})

    def namespace(self, number: int, block_tokens: int, block_bytes: int) -> None:
        """Write the shape of a namespace's blocks, once."""
        if number not in self._namespaces:
            self._namespaces.add(number)
            self._write({"namespace": number, "block_tokens": block_tokens, "block_bytes": block_bytes})

    def ask(
        self,
        at_s: float,
        namespace: int,
        session: str,
        parent: bytes,
        blocks: Sequence[bytes],
        num_found: int,
    ) -> None:
        """Write that blocks of one chain were asked for, and how many were found."""
        access = self._access("ask", at_s, namespace, session, parent, blocks)
        self._write({**access, "num_found": num_found})

    def put(self, at_s: float, namespace: int, session: str, parent: bytes, blocks: Sequence[bytes]) -> None:
        """Write that blocks of one chain were put."""
        self._write(self._access("put", at_s, namespace, session, parent, blocks))

    def session(
        self, at_s: float, session: str, urgency: Urgency, num_decoded_tokens: int = 0, back_in_s: float = 0.0
    ) -> None:
        """Write the state of a session: that it ended, or how soon it needs its blocks."""
        self.num_accesses += 1
        said: dict[str, Any] = {"at": self._since(at_s), "op": "session"}
        said |= {"session": self._name(b"session", session.encode()), "urgency": urgency.name.lower()}
        if num_decoded_tokens:
            said["num_decoded_tokens"] = num_decoded_tokens
        if back_in_s:
            said["back_in_s"] = round(back_in_s, 3)
        self._write(said)

    def lost(self, at_s: float, count: int) -> None:
        """Write that `count` accesses were not recorded."""
        self.num_lost += count
        self._write({"at": self._since(at_s), "lost": count})

    def _access(
        self, op: str, at_s: float, namespace: int, session: str, parent: bytes, blocks: Sequence[bytes]
    ) -> dict[str, Any]:
        self.num_accesses += 1
        access: dict[str, Any] = {"at": self._since(at_s), "op": op, "namespace": namespace}
        if session:
            access["session"] = self._name(b"session", session.encode())
        salt = b"%d" % namespace
        if parent:
            access["parent"] = self._name(salt, parent)
        access["blocks"] = [self._name(salt, block) for block in blocks]
        return access

    def _name(self, kind: bytes, name: bytes) -> str:
        return hashlib.blake2b(name, digest_size=NAME_BYTES, key=self._key, person=kind[:16]).hexdigest()

    def _since(self, at_s: float) -> float:
        if self._began_at is None:
            self._began_at = at_s
        return round(at_s - self._began_at, 6)

    def _write(self, value: dict[str, Any]) -> None:
        self._out.write(json.dumps(value, separators=(",", ":")) + "\n")


def read_recording(lines: Iterable[tuple[int, str]], path: Path) -> Trace:
    """Read a recording. Raises TraceError.

    What was found when it was recorded is put again where it is missing in a replay, because its runtime
    would have computed it; what was missing then is put when the recording says so.
    """
    builder = TraceBuilder(path.name, path)
    namespaces: dict[int, tuple[int, int]] = {}  # by number: index, block_tokens
    for number, line in lines:
        record = parse(line, path, number)
        if HEADER_KEY in record:
            if record[HEADER_KEY] != FORMAT_VERSION:
                message = f"a recording of version {record[HEADER_KEY]}; this kvtier reads {FORMAT_VERSION}"
                raise TraceError(path, number, message)
        elif "block_tokens" in record:
            tokens, num_bytes = record["block_tokens"], record.get("block_bytes", 0)
            if not is_count(tokens) or not 0 < tokens <= MAX_BLOCK_TOKENS or not is_count(num_bytes):
                raise TraceError(path, number, "block_tokens and block_bytes are counts; the file was edited")
            index = builder.add_namespace(TraceNamespace(tokens, num_bytes))
            namespaces[_namespace_of(record, path, number)] = (index, tokens)
        elif record.get("op") == "session":
            _read_session(builder, record, path, number)
        elif "lost" in record:
            builder.num_lost += record["lost"] if is_count(record["lost"]) else 0
        else:
            _read_access(builder, namespaces, record, path, number)
    return builder.build()


def _read_session(builder: TraceBuilder, record: dict[str, Any], path: Path, number: int) -> None:
    name, session = record.get("urgency"), record.get("session")
    num_decoded, back_in_s = record.get("num_decoded_tokens", 0), record.get("back_in_s", NEVER)
    is_right = is_number(record.get("at")) and is_count(num_decoded) and isinstance(name, str)
    is_right &= isinstance(back_in_s, int | float) and 0 <= back_in_s <= NEVER
    if not is_right or not isinstance(session, str) or name not in URGENCIES:
        message = f"no session: it has at, session, and an urgency of {', '.join(URGENCIES)}"
        raise TraceError(path, number, message)
    urgency = URGENCIES[name]
    hint = SessionHint(urgency, num_decoded, back_in_s, urgency is Urgency.ENDED)
    at_s = record["at"]
    builder.add(at_s, (), num_tokens=0, num_asked=0, num_filled=0, session=session, hint=hint, line=number)


def _read_access(
    builder: TraceBuilder,
    namespaces: dict[int, tuple[int, int]],
    record: dict[str, Any],
    path: Path,
    number: int,
) -> None:
    blocks, op, parent = record.get("blocks"), record.get("op"), record.get("parent")
    session = record.get("session", "")
    if op not in ("ask", "put") or not is_number(record.get("at")) or not isinstance(blocks, list):
        raise TraceError(path, number, "no access: it has at, op (ask or put), namespace and blocks")
    if not are_names(blocks if parent is None else [parent, *blocks]) or not isinstance(session, str):
        raise TraceError(path, number, "blocks, parent and session are texts; the file was edited")
    name = _namespace_of(record, path, number)
    if name not in namespaces:
        raise TraceError(path, number, f"namespace {name} is described nowhere before")
    index, block_tokens = namespaces[name]
    num_asked = len(blocks) if op == "ask" else 0
    num_found = record.get("num_found", 0) if op == "ask" else len(blocks)
    if type(num_found) is not int or not 0 <= num_found <= len(blocks):
        raise TraceError(path, number, f"num_found is {num_found!r} of {len(blocks)} blocks")
    builder.add(
        record["at"],
        blocks,
        num_tokens=num_asked * block_tokens,
        num_asked=num_asked,
        num_filled=num_found,
        parent=parent,
        session=session,
        namespace=index,
        line=number,
    )


def _namespace_of(record: dict[str, Any], path: Path, number: int) -> int:
    name = record.get("namespace", 0)
    if not is_count(name):
        raise TraceError(path, number, f"namespace is {name!r}; it is a number")
    return int(name)
