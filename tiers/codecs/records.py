"""RecordCodecs: what the cold store needs to write and read encoded records.

A record says which codec wrote it; what the bytes mean, the namespace says. Bringing the two together is
all this does, and counting: how much each codec saved and what that cost is what `auto` decides by.

A record is as long as was reserved for it, padding included: its place was decided before anybody looked at
its bytes.
"""

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from ..base import Buffer
from ..block import FragmentLabel, NamespaceIdentity
from .base import Codec, CodecError, Shape, shape_of
from .registry import codec_of_record

MAX_KNOWN = 4096  # pairs of namespace and layer group whose shape is remembered


@dataclass(slots=True)
class CodecStatistics:
    """What one codec did since the store was opened, in both directions."""

    name: str
    num_encoded: int = 0
    num_unfit: int = 0  # too long once encoded, stored as they are
    num_decoded: int = 0
    num_refused: int = 0  # records that nothing encodes to
    encoded_raw_bytes: int = 0
    encoded_stored_bytes: int = 0  # what was reserved for them
    decoded_raw_bytes: int = 0
    encode_s: float = 0.0  # of threads, added up
    decode_s: float = 0.0


class RecordCodecs:
    """Thread-safe. `namespaces` is looked at with every record and may grow."""

    def __init__(self, namespaces: Mapping[bytes, NamespaceIdentity]) -> None:
        self._namespaces = namespaces
        self._shape = lru_cache(MAX_KNOWN)(self._find_shape)
        self._codec = lru_cache(MAX_KNOWN)(codec_of_record)
        self._books: dict[int, CodecStatistics] = {}
        self._lock = threading.Lock()

    def parameters(self, codec_id: int) -> bytes:
        """Return what stands in the header of a record of this codec."""
        return self._codec(codec_id, b"").parameters()

    def is_exact(self, codec_id: int, parameters: bytes = b"") -> bool:
        """Whether records of this codec decode to what was put. Raises CodecError."""
        return self._codec(codec_id, parameters or self.parameters(codec_id)).exactness.is_exact

    def encode(self, label: FragmentLabel, payload: Buffer, into: Buffer) -> None:
        """Fill `into` (label.stored_length long) with the encoded payload and zeros. Raises DoesNotFit, and
        CodecError when this version cannot write this codec."""
        codec = self._codec(label.codec_id, b"")
        shape = self._shape(label.namespace_digest, label.group)
        began_at = time.perf_counter()
        length = 0
        try:
            length = codec.encode(shape, payload, into)
            into[length:] = bytes(len(into) - length)
        finally:
            seconds = time.perf_counter() - began_at
            with self._lock:
                books = self._books_of(codec)
                books.encode_s += seconds
                books.num_encoded += length > 0
                books.num_unfit += length == 0
                books.encoded_raw_bytes += len(payload) if length else 0
                books.encoded_stored_bytes += len(into) if length else 0

    def decode(
        self, label: FragmentLabel, codec_id: int, parameters: bytes, stored: Buffer, into: Buffer
    ) -> None:
        """Fill `into` (label.raw_length long) from the payload of a record. Raises CodecError."""
        codec = self._codec(codec_id, parameters)
        shape = self._shape(label.namespace_digest, label.group)
        if shape.raw_bytes != len(into):
            raise CodecError(f"{shape.raw_bytes} bytes, asked for {len(into)}")
        began_at = time.perf_counter()
        is_refused = True
        try:
            codec.decode(shape, stored, into)
            is_refused = False
        finally:
            seconds = time.perf_counter() - began_at
            with self._lock:
                books = self._books_of(codec)
                books.decode_s += seconds
                books.num_decoded += not is_refused
                books.num_refused += is_refused
                books.decoded_raw_bytes += 0 if is_refused else len(into)

    def statistics(self) -> list[CodecStatistics]:
        """Return a copy of the books, one per codec that was used."""
        with self._lock:
            return [replace(books) for _, books in sorted(self._books.items())]

    def _books_of(self, codec: Codec) -> CodecStatistics:
        return self._books.setdefault(codec.codec_id, CodecStatistics(codec.name))

    def _find_shape(self, namespace_digest: bytes, group: int) -> Shape:
        identity = self._namespaces.get(namespace_digest)
        if identity is None or not 0 <= group < identity.geometry.num_groups:
            raise CodecError("a namespace or layer group that the cold store was not told of")
        return shape_of(identity.geometry, group)
