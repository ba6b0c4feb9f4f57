"""Encodes and decodes payloads of records for the cold store.

A record names its codec; its namespace gives the shape of the payload. RecordCodecs brings the two together,
and counts what each codec saved and what that cost: `auto` decides by it.

A record is as long as was reserved for it, padding included: its place was decided before its bytes were
read.

Only namespaces that name a profile have lossy records, and those name it too. Which profiles there are is
set from outside (`adopt`) and may change while records are read; a record without its profile cannot be read,
which is a miss, until the profile is back.
"""

import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from ..base import Buffer
from ..block import HASH_BYTES, FragmentLabel, NamespaceIdentity
from .base import PROFILED_ID, Codec, CodecError, CodecMissing, DoesNotFit, Shape, shape_of
from .exact.general import Zstd
from .lossy.profile import Profile
from .lossy.profiled import Profiled
from .needs import Need, Needs
from .registry import codec_of_record

log = logging.getLogger(__name__)

MAX_KNOWN = 4096  # cached shapes, by namespace and layer group


@dataclass(slots=True)
class CodecStatistics:
    """Counters of one codec since the store was opened, in both directions."""

    name: str
    num_encoded: int = 0
    num_unfit: int = 0  # too long once encoded, stored as they are
    num_decoded: int = 0
    num_refused: int = 0  # records that the codec does not write
    num_unreadable: int = 0  # records without their profile or library
    encoded_raw_bytes: int = 0
    encoded_stored_bytes: int = 0  # what was reserved for them
    decoded_raw_bytes: int = 0
    decoded_stored_bytes: int = 0
    encode_s: float = 0.0  # of threads, added up
    decode_s: float = 0.0


class RecordCodecs:
    """Codecs of one store's records. Thread-safe. `namespaces` is read with every record and may grow."""

    def __init__(self, namespaces: Mapping[bytes, NamespaceIdentity]) -> None:
        self._namespaces = namespaces
        self._shape = lru_cache(MAX_KNOWN)(self._find_shape)
        self._fixed_codec = lru_cache(MAX_KNOWN)(codec_of_record)
        self.profiled: Mapping[bytes, Profiled] = {}  # by digest; replaced as a whole
        self.zstd = Zstd()
        self.needs = Needs()
        self._books: dict[int, CodecStatistics] = {}
        self._missed: set[str] = set()  # what is missing and was said to be
        self._lock = threading.Lock()

    def adopt(self, profiles: Mapping[bytes, Profile]) -> None:
        """Replace the known profiles by these, by digest."""
        known = self.profiled
        self.profiled = {
            digest: known.get(digest) or Profiled(profile) for digest, profile in profiles.items()
        }
        with self._lock:
            self._missed.clear()  # say it again if it is still so

    def can_read(self, identity: NamespaceIdentity) -> bool:
        """Whether the profile that a namespace names, if it names one, is there."""
        return not identity.profile_digest or identity.profile_digest in self.profiled

    def parameters(self, label: FragmentLabel) -> bytes:
        """Return the codec parameters in the header of this fragment's record. Raises CodecError.
        Whether or not its codec can be used now: records are copied as stored."""
        if label.codec_id == PROFILED_ID:
            return self._profile_digest(label)
        return self.codec_to_write(label).parameters()

    def shape(self, label: FragmentLabel) -> Shape:
        """Return the shape of a fragment. Raises CodecError for an unknown namespace or layer group."""
        return self._shape(label.namespace_digest, label.group)

    def codec_to_write(self, label: FragmentLabel) -> Codec:
        """Return the codec that writes, and wrote, records of this fragment. Raises CodecError."""
        is_profiled = label.codec_id == PROFILED_ID
        return self._codec(label.codec_id, self._profile_digest(label) if is_profiled else b"")

    def is_exact(self, codec_id: int, parameters: bytes) -> bool:
        """Whether records of this codec decode to what was put; False where a profile is missing.
        Raises CodecError."""
        try:
            return self._codec(codec_id, parameters).exactness.is_exact
        except CodecMissing:
            return codec_id != PROFILED_ID

    def encode(self, label: FragmentLabel, payload: Buffer, into: Buffer) -> None:
        """Fill `into` (label.stored_length long) with the encoded payload and zeros.
        Raises DoesNotFit, and CodecError when this version cannot write this codec."""
        codec = self.codec_to_write(label)
        shape = self._shape(label.namespace_digest, label.group)
        need = Need(codec.codec_id, label.namespace_digest, label.group)
        began_at = time.perf_counter()
        length = 0
        try:
            length = codec.encode(shape, payload, into)
            into[length:] = bytes(len(into) - length)
            self.needs.fitted(need, length, len(payload))
        except DoesNotFit:
            self.needs.unfit(need, len(into), len(payload))
            raise
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
        """Fill `into` (label.raw_length long) from the payload of a record.
        Raises CodecError, and CodecMissing when it is not the record's fault."""
        try:
            codec = self._codec(codec_id, parameters)
            self._decode(codec, label, stored, into)
        except CodecMissing as missing:
            self._note_missing(codec_id, str(missing))
            raise

    def _decode(self, codec: Codec, label: FragmentLabel, stored: Buffer, into: Buffer) -> None:
        shape = self._shape(label.namespace_digest, label.group)
        if shape.raw_bytes != len(into):
            raise CodecError(f"{shape.raw_bytes} bytes, asked for {len(into)}")
        began_at = time.perf_counter()
        is_decoded = is_missing = False
        try:
            codec.decode(shape, stored, into)
            is_decoded = True
        except CodecMissing:
            is_missing = True
            raise
        finally:
            seconds = time.perf_counter() - began_at
            with self._lock:
                books = self._books_of(codec)
                books.decode_s += seconds
                books.num_decoded += is_decoded
                books.num_refused += not (is_decoded or is_missing)
                books.decoded_raw_bytes += len(into) if is_decoded else 0
                books.decoded_stored_bytes += len(stored) if is_decoded else 0

    def statistics(self) -> list[CodecStatistics]:
        """Return a copy of the counters, one per codec that was used."""
        with self._lock:
            return [replace(books) for _, books in sorted(self._books.items())]

    def _codec(self, codec_id: int, parameters: bytes) -> Codec:
        if codec_id == Zstd.codec_id and not parameters:
            return self.zstd
        if codec_id != PROFILED_ID:
            return self._fixed_codec(codec_id, parameters)
        codec = self.profiled.get(parameters.ljust(HASH_BYTES, b"\0"))  # records end in zeros
        if codec is None:
            raise CodecMissing(
                f"profile {parameters.hex()[:12]} is not there; put its file back into the directory "
                "compression.profiles and reload"
            )
        return codec

    def _profile_digest(self, label: FragmentLabel) -> bytes:
        identity = self._namespaces.get(label.namespace_digest)
        return identity.profile_digest if identity is not None else b""

    def _note_missing(self, codec_id: int, why: str) -> None:
        """Count a record that cannot be read for now; say why once."""
        with self._lock:
            is_new = why not in self._missed
            self._missed.add(why)
            name = Profiled.name if codec_id == PROFILED_ID else self._fixed_codec(codec_id, b"").name
            self._books.setdefault(codec_id, CodecStatistics(name)).num_unreadable += 1
        if is_new:
            log.warning("records cannot be read and are misses until this is repaired: %s", why)

    def _books_of(self, codec: Codec) -> CodecStatistics:
        return self._books.setdefault(codec.codec_id, CodecStatistics(codec.name))

    def _find_shape(self, namespace_digest: bytes, group: int) -> Shape:
        identity = self._namespaces.get(namespace_digest)
        if identity is None or not 0 <= group < identity.geometry.num_groups:
            raise CodecError("a namespace or layer group that the cold store was not told of")
        return shape_of(identity.geometry, group)
