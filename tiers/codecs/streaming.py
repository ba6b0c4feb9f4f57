"""Encodes fragments for transfer over a network, and decodes them.

    sender: which codec pays here? -> encode -> chunks, with the hash of the raw payload
    reader: chunks -> decode -> compare the hash -> believe

Both ends use this module, a client through one import (clients/operations/stream_codecs.py), so that there is
one rule. Only exact codecs are used over a network: a record of a profile is decoded before it is sent.

Each sender measures for each connection whether encoding pays, by sending raw and encoded in turns
(contest.py). Asking the other end for its speed was rejected: a stated number cannot be trusted, and the cost
of the peer's work shows in how soon it takes the next bytes.

A fragment that takes less time than handing it to a thread is encoded and decoded at once (`is_brief`).

Loops of a codec take up to seconds to load, the first time that they run in a process. A client loads them
when it first needs them; between hosts nothing is encoded before both ends have, as a host that keeps silent
for a second is given up (`loaded_codecs`).
"""

import importlib.util
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Final, NamedTuple

import numpy as np

from ..base import Buffer
from .base import Codec, CodecError, DoesNotFit, Shape
from .contest import EncodingContest
from .registry import BY_NAME, codec_named, codec_of_record

#: Candidates of `auto`: the first one that accepts the values, if it pays.
CANDIDATES: Final = ("exponents", "float8", "planes")
CHECKSUM_BYTES: Final = 16
_BRIEF: Final = frozenset(
    {codec_named("exponents").codec_id, codec_named("float8").codec_id}
)  # 8 GB/s and more
_BRIEF_BYTES: Final = 1 << 20


class Encoded(NamedTuple):
    """One encoded fragment. `checksum` is the xxh3-128 of the raw payload."""

    codec_id: int
    stored: bytes
    checksum: bytes


@cache
def usable_codecs() -> tuple[int, ...]:
    """Return the numbers of the codecs with an installed library, preferred first; none without xxhash.

    A client without any of them reads and writes raw fragments."""
    if importlib.util.find_spec("xxhash") is None:
        return ()
    codecs = [make() for make in BY_NAME.values()]
    return tuple(one.codec_id for one in codecs if one.library and importlib.util.find_spec(one.library))


def decode_fragment(codec_id: int, shape: Shape, stored: Buffer, into: Buffer, checksum: bytes) -> bool:
    """Fill `into` (shape.raw_bytes long) with what a sender encoded.
    False when the bytes are not what their checksum says, for whatever reason. `into` is then undefined.
    Releases the GIL."""
    return len(checksum) == CHECKSUM_BYTES and decoded_checksum(codec_id, shape, stored, into) == checksum


def decoded_checksum(codec_id: int, shape: Shape, stored: Buffer, into: Buffer) -> bytes:
    """Fill `into` like `decode_fragment`, and return the checksum of what is there then.

    An encoding that cannot be read has none."""
    import xxhash

    if codec_id not in usable_codecs() or len(stored) > shape.raw_bytes or len(into) != shape.raw_bytes:
        return b""
    try:
        codec_of_record(codec_id, b"").decode(shape, stored, into)
    except CodecError:
        return b""
    _loaded.add((codec_id, shape.dtype, False))
    return xxhash.xxh3_128_digest(into)


_loaded: set[tuple[int, str, bool]] = set()  # what has run in this process, encoding or not
_LOADING: Final = frozenset(codec_named(one).codec_id for one in CANDIDATES)  # the others load nothing long


def note_loaded(codec_id: int, dtype: str) -> None:
    """Take in that a codec has encoded and decoded values of this dtype in this process."""
    _loaded.update(((codec_id, dtype, True), (codec_id, dtype, False)))


def loaded_codecs(dtype: str, *, encodes: bool) -> tuple[int, ...]:
    """Return those of `usable_codecs` that encode, or decode, this dtype with nothing long to load first."""
    return tuple(one for one in usable_codecs() if one not in _LOADING or (one, dtype, encodes) in _loaded)


def is_brief(codec_id: int, shape: Shape, *, encodes: bool) -> bool:
    """Whether encoding, or decoding, takes less than handing it to a thread and hearing back:
    some tenths of a millisecond at most. Not the first time, which loads something."""
    return (
        codec_id in _BRIEF and shape.raw_bytes <= _BRIEF_BYTES and (codec_id, shape.dtype, encodes) in _loaded
    )


class StreamChoice(NamedTuple):
    """The codec to send a fragment with, and the comparison that its duration counts for."""

    codec: Codec | None  # None: raw
    contest: EncodingContest | None = None

    def count_sent(self, raw_bytes: int, seconds: float) -> None:
        """Count a fragment that was sent, and the seconds that sending took."""
        if self.contest is not None:
            self.contest.sent(self.codec is not None, raw_bytes, seconds)


class StreamEncoder:
    """Encodes the fragments of one connection, where that pays. Thread-safe.

    `codec_ids`: what the other end reads.
    """

    def __init__(self, codec_ids: Sequence[int]) -> None:
        self.codec_ids = frozenset(codec_ids)
        usable = [codec_of_record(one, b"") for one in usable_codecs() if one in self.codec_ids]
        self._codecs: dict[str, Codec] = {codec.name: codec for codec in usable}
        self._contests: dict[int, EncodingContest] = {}  # by codec

    def choose(self, shape: Shape, codec_name: str) -> StreamChoice:
        """Return how to send a fragment of this shape.
        `codec_name`: the policy's, or `auto` for what was measured to cost least."""
        names = CANDIDATES if codec_name == "auto" else (codec_name,)
        known = [self._codecs[name] for name in names if name in self._codecs]
        codec = next((one for one in known if one.accepts(shape)), None)
        if codec is None or codec_name != "auto":
            return StreamChoice(codec)
        contest = self._contests.setdefault(codec.codec_id, EncodingContest())
        return StreamChoice(codec if contest.is_coded else None, contest)

    def encode(self, codec: Codec, shape: Shape, payload: Buffer, checksum: bytes = b"") -> Encoded | None:
        """Return a fragment encoded; None when it does not fit and is to be sent raw.
        `payload` must not change meanwhile. `checksum`: of the payload, where it is known. Releases the GIL.
        """
        import xxhash

        buffer = np.empty(shape.raw_bytes, np.uint8)  # nothing is reserved: whatever is shorter helps
        try:
            length = codec.encode(shape, payload, buffer.data)
        except (DoesNotFit, CodecError):
            return None
        _loaded.add((codec.codec_id, shape.dtype, True))
        return Encoded(codec.codec_id, buffer[:length].tobytes(), checksum or xxhash.xxh3_128_digest(payload))


class SendMeter:
    """Measures the seconds that each fragment of one stream takes to send."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._before = clock()

    def begin(self) -> None:
        """Start the clock: the stream waited for something to send until now."""
        self._before = self._clock()

    def sent(self, choice: StreamChoice, raw_bytes: int) -> None:
        """Count a fragment: the transport took the last of it, and would take more."""
        now = self._clock()
        choice.count_sent(raw_bytes, now - self._before)
        self._before = now
