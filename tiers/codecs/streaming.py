"""Streaming: fragments written smaller for the way over a network, by whichever end sends them.

    sender: which codec pays here? -> encode -> chunks, with the hash of the raw payload
    reader: chunks -> decode -> compare the hash -> believe

Both ends use this module, a client through one import (clients/coded.py), so that the rule is one and the
same. Only exact codecs are spoken over a wire: what a profile shortened rests shortened, and travels as it
decodes.

When it pays is measured, for each connection by its sender: share / bandwidth + 2 / speed a byte, against 1
/ bandwidth. Encoding does run beside sending, and so does decoding, which costs the other end about as
much; but all of it wants processors, and so does gRPC: counting them as overlapping, `auto` lost a fifth on
a link that is faster than gRPC on two processors (bench/compression/streams.py). Who has more of them names
a codec. The bandwidth is what the transport accepted while it was waited for; where nothing was waited for,
what was sent is a lower bound. Asking the other end for its speed was rejected: a number that a peer states
would have to be doubted.
"""

import importlib.util
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Final, NamedTuple

from ..base import Buffer
from .base import Codec, CodecError, DoesNotFit, Shape
from .registry import BY_NAME, codec_named

#: What each codec needs beside numpy. A client that has none of it reads and writes raw fragments.
_NEEDS: Final = {"exponents": "numba", "planes": "zstandard", "lz4": "lz4", "zstd": "zstandard"}
#: What is looked at where nobody named a codec.
CANDIDATES: Final = ("exponents", "planes")
MIN_SENT_BYTES: Final = 4 << 20  # before a bandwidth is believed
WORTH: Final = 0.9  # of the time without a codec: what is gained has to be seen
_WEIGHT: Final = 0.2  # of the newest measurement
CHECKSUM_BYTES: Final = 16


class Encoded(NamedTuple):
    """One fragment as it travels. `checksum` is the xxh3-128 of the raw payload."""

    codec_id: int
    stored: bytes
    checksum: bytes


@cache
def usable_codecs() -> tuple[int, ...]:
    """Return the numbers of the codecs that can be used here, fastest first; none without xxhash."""
    if importlib.util.find_spec("xxhash") is None:
        return ()
    names = [name for name, library in _NEEDS.items() if importlib.util.find_spec(library) is not None]
    return tuple(codec_named(name).codec_id for name in names)


def name_of(codec_id: int) -> str:
    """Return the name of an exact codec. Raises CodecError for another number."""
    for name, make in BY_NAME.items():
        if make().codec_id == codec_id:
            return name
    raise CodecError(f"codec {codec_id} is not one that travels")


def decode_fragment(codec_id: int, shape: Shape, stored: Buffer, into: Buffer, checksum: bytes) -> bool:
    """Fill `into` (shape.raw_bytes long) with what a sender encoded; False when the bytes are not what their
    checksum says, for whatever reason. `into` is then undefined. Releases the GIL."""
    import xxhash

    if codec_id not in usable_codecs() or len(stored) > shape.raw_bytes or len(into) != shape.raw_bytes:
        return False
    try:
        codec_named(name_of(codec_id)).decode(shape, stored, into)
    except CodecError:
        return False
    return bool(xxhash.xxh3_128_digest(into) == checksum)


class _Pace:
    """A rate that is learned: bytes a second, 0 while it is not known."""

    def __init__(self) -> None:
        self.bytes_per_s = 0.0

    def learn(self, num_bytes: int, seconds: float) -> None:
        rate = num_bytes / max(seconds, 1e-9)
        known = self.bytes_per_s
        self.bytes_per_s = rate if not known else known + _WEIGHT * (rate - known)


class StreamEncoder:
    """Encodes the fragments of one connection, where that pays. `encode` may run in a thread, one at a time.

    `codec_ids`: what the other end reads.
    """

    def __init__(self, codec_ids: Sequence[int], *, clock: Callable[[], float] = time.perf_counter) -> None:
        self.codec_ids = frozenset(codec_ids)
        usable = [codec_named(name_of(one)) for one in usable_codecs() if one in self.codec_ids]
        self._codecs: dict[str, Codec] = {codec.name: codec for codec in usable}
        self._clock = clock
        self._bandwidth = _Pace()
        self._sent_bytes = 0
        self._waited_s = self._elapsed_s = 0.0
        self._speeds: dict[int, _Pace] = {}
        self._shares: dict[int, float] = {}
        self._num_tried: dict[int, int] = {}

    def sent(self, num_bytes: int, waited_s: float, elapsed_s: float) -> None:
        """The transport took `num_bytes`, and let the sender wait `waited_s` of the `elapsed_s` since it took
        the ones before."""
        self._sent_bytes += num_bytes
        self._waited_s += waited_s
        self._elapsed_s += elapsed_s
        if self._sent_bytes < MIN_SENT_BYTES:
            return
        if self._waited_s > self._elapsed_s / 2:
            self._bandwidth.learn(self._sent_bytes, self._waited_s)
        elif self._sent_bytes > self._bandwidth.bytes_per_s * self._elapsed_s:
            self._bandwidth.learn(self._sent_bytes, self._elapsed_s)  # it has at least so much
        self._sent_bytes, self._waited_s, self._elapsed_s = 0, 0.0, 0.0

    def choose(self, shape: Shape, codec_name: str) -> Codec | None:
        """Return the codec for a fragment of this shape, None when it is to travel as it is. `codec_name`:
        what the policy says, `auto` to go by what was measured."""
        names = CANDIDATES if codec_name == "auto" else (codec_name,)
        known = [self._codecs[name] for name in names if name in self._codecs]
        accepting = [codec for codec in known if codec.accepts(shape)]
        if codec_name != "auto":
            return accepting[0] if accepting else None
        bandwidth = self._bandwidth.bytes_per_s
        if not bandwidth or not accepting:
            return None
        untried = [codec for codec in accepting if self._num_tried.get(codec.codec_id, 0) < 2]
        if untried:
            return untried[0]
        best = min(accepting, key=self._seconds_per_byte)
        return best if self._seconds_per_byte(best) < WORTH / bandwidth else None

    def encode(self, codec: Codec, shape: Shape, payload: Buffer, checksum: bytes = b"") -> Encoded | None:
        """Return a fragment encoded; None when it does not fit and is to travel as it is. `payload` must not
        change meanwhile. `checksum`: of the payload, where it is known. Releases the GIL."""
        import xxhash

        began_at = self._clock()
        buffer = bytearray(shape.raw_bytes)  # nothing is reserved: whatever is shorter helps
        try:
            length = codec.encode(shape, payload, memoryview(buffer))
        except (DoesNotFit, CodecError):
            length = 0
        self._learn(codec.codec_id, shape.raw_bytes, length, self._clock() - began_at)
        if not length:
            return None
        stored = bytes(memoryview(buffer)[:length])
        return Encoded(codec.codec_id, stored, checksum or xxhash.xxh3_128_digest(payload))

    def _seconds_per_byte(self, codec: Codec) -> float:
        share = self._shares.get(codec.codec_id, 1.0)
        speed = self._speeds[codec.codec_id].bytes_per_s
        return share / self._bandwidth.bytes_per_s + 2 / speed

    def _learn(self, codec_id: int, raw_bytes: int, length: int, seconds: float) -> None:
        """Remember what encoding took. Not of the first time, which may have compiled something."""
        num_tried = self._num_tried[codec_id] = self._num_tried.get(codec_id, 0) + 1
        if num_tried > 1:
            self._speeds.setdefault(codec_id, _Pace()).learn(raw_bytes, seconds)
        share = length / raw_bytes if length else 1.0
        known = self._shares.get(codec_id, share)
        self._shares[codec_id] = known + _WEIGHT * (share - known)


class SendMeter:
    """One stream's account of what its transport took, for the encoder of its connection."""

    def __init__(self, encoder: StreamEncoder, clock: Callable[[], float] = time.perf_counter) -> None:
        self._encoder = encoder
        self._clock = clock
        self._before = self._handed_at = clock()

    def handing(self) -> None:
        """Something is handed to the transport now."""
        self._handed_at = self._clock()

    def taken(self, num_bytes: int) -> None:
        """The transport took it, and would take more."""
        now = self._clock()
        self._encoder.sent(num_bytes, now - self._handed_at, now - self._before)
        self._before = now
