"""The manifest: a small log of what happened to segments and namespaces, the authority at recovery.

A file is a prologue, a snapshot of the state when it was begun, and the events since, each framed with
length and CRC32C. Two files alternate, `manifest.0` and `manifest.1`: a new one is written beside them,
flushed, renamed over the older one, and the directory is flushed, so that one of them is whole at every
moment. A torn tail ends the log where it is torn; a damaged snapshot sends recovery to the older file.
What is lost that way is only cache: segments carry random epochs, so a stale manifest cannot make a
record pass for another.

A database (SQLite, LMDB) was rejected: the events are five, and a second library would decide what
happens after a failed flush.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

import google_crc32c

from ..block import Geometry, NamespaceIdentity

MAGIC = b"kvtmanif"
VERSION = 1
ENCRYPTED = 1
INCOMPAT_FEATURES = ENCRYPTED  # known here
MAX_FRAME_BYTES = 1 << 20

# magic, version, padding, compat, incompat, generation. These 28 bytes and their CRC are the same in every
# version for ever: they are how an older daemon knows that it must not touch a newer one's directory.
_PROLOGUE = struct.Struct("<8sHHIIQ")
_CRC = struct.Struct("<I")
PROLOGUE_BYTES = _PROLOGUE.size + _CRC.size
_FRAME = struct.Struct("<II")  # bytes, CRC of the bytes
_GEOMETRY = struct.Struct("<BQI")
_SEGMENT = struct.Struct("<BIQ")


class Kind(IntEnum):
    """Kinds of events. Numbers are never reused."""

    GEOMETRY = 1  # segment bytes, number of segments
    NAMESPACE = 2  # canonical identity
    OPENED = 3  # segment, epoch of its new life
    SEALED = 4
    FREED = 5
    SNAPSHOT_ENDS = 6


class IncompatibleFormat(Exception):
    """The directory was written by a version we do not know. It must be set aside untouched."""


class ManifestDamaged(Exception):
    """A manifest file without a valid prologue and snapshot."""


class Life(NamedTuple):
    """The present life of a segment that is not free."""

    epoch: int
    sealed: bool


@dataclass(slots=True)
class ManifestState:
    """State that the events add up to. `lives` is in order of opening, sealed ones in order of sealing."""

    segment_bytes: int = 0
    num_segments: int = 0
    generation: int = 0
    features: int = 0  # incompatible ones that were ever used here
    namespaces: dict[bytes, NamespaceIdentity] = field(default_factory=dict)  # by digest
    lives: dict[int, Life] = field(default_factory=dict)  # by segment; absent: free
    complete: bool = False  # the whole snapshot was there
    num_lost_bytes: int = 0  # behind the first frame that was torn or damaged
    num_odd_events: int = 0  # whole, but meaning nothing; skipped

    def apply(self, body: bytes) -> None:
        """Change the state by one event. Never raises: an event that makes no sense is counted."""
        try:
            self._apply(body)
        except (struct.error, ValueError):
            self.num_odd_events += 1

    def _apply(self, body: bytes) -> None:
        kind = Kind(body[0]) if body else Kind(0)
        if kind is Kind.GEOMETRY:
            _, self.segment_bytes, self.num_segments = _GEOMETRY.unpack(body)
        elif kind is Kind.NAMESPACE:
            identity = parse_identity(body[1:])
            self.namespaces[identity.digest] = identity
        elif kind is Kind.SNAPSHOT_ENDS:
            self.complete = True
        else:
            _, number, epoch = _SEGMENT.unpack(body)
            present = self.lives.pop(number, None)
            if kind is Kind.OPENED:
                self.lives[number] = Life(epoch, sealed=False)
            elif present is None or present.epoch != epoch:
                if present is not None:
                    self.lives[number] = present
                raise ValueError(f"{kind.name} of a life that is not")
            elif kind is Kind.SEALED:
                self.lives[number] = Life(epoch, sealed=True)

    def snapshot(self) -> Iterator[bytes]:
        """Yield the events that rebuild this state."""
        yield _GEOMETRY.pack(Kind.GEOMETRY, self.segment_bytes, self.num_segments)
        for identity in self.namespaces.values():
            yield namespace_event(identity)
        for number, life in self.lives.items():
            yield segment_event(Kind.OPENED, number, life.epoch)
            if life.sealed:
                yield segment_event(Kind.SEALED, number, life.epoch)
        yield bytes([Kind.SNAPSHOT_ENDS])


def segment_event(kind: Kind, number: int, epoch: int) -> bytes:
    """Return the event that `kind` happened to segment `number` in its life `epoch`."""
    return _SEGMENT.pack(kind, number, epoch)


def namespace_event(identity: NamespaceIdentity) -> bytes:
    """Return the event that a namespace became known."""
    return bytes([Kind.NAMESPACE]) + identity.canonical()


def frame(body: bytes) -> bytes:
    """Return `body` as it stands in the file."""
    assert 0 < len(body) <= MAX_FRAME_BYTES
    return _FRAME.pack(len(body), google_crc32c.value(body)) + body


def pack_prologue(generation: int, features: int = 0) -> bytes:
    """Return the first bytes of a manifest file."""
    head = _PROLOGUE.pack(MAGIC, VERSION, 0, 0, features, generation)
    return head + _CRC.pack(google_crc32c.value(head))


def parse_manifest(data: bytes) -> ManifestState:
    """Return what the file says, as far as it can be believed.

    Raises IncompatibleFormat, ManifestDamaged; nothing else, whatever the bytes.
    """
    head = data[: _PROLOGUE.size]
    if len(data) < PROLOGUE_BYTES or head[:8] != MAGIC:
        raise ManifestDamaged("no manifest here")
    if google_crc32c.value(head) != _CRC.unpack_from(data, _PROLOGUE.size)[0]:
        raise ManifestDamaged("prologue CRC does not match")
    _, version, _, _, incompat, generation = _PROLOGUE.unpack(head)
    if version != VERSION or incompat & ~INCOMPAT_FEATURES:
        raise IncompatibleFormat(f"manifest version {version}, incompatible features {incompat:#x}")
    state = ManifestState(generation=generation, features=incompat)
    start = PROLOGUE_BYTES
    while start + _FRAME.size <= len(data):
        length, crc = _FRAME.unpack_from(data, start)
        body = data[start + _FRAME.size : start + _FRAME.size + length]
        if not 0 < length <= MAX_FRAME_BYTES or len(body) < length or google_crc32c.value(body) != crc:
            break
        state.apply(body)
        start += _FRAME.size + length
    state.num_lost_bytes = len(data) - start
    if state.segment_bytes == 0:
        raise ManifestDamaged("no geometry in it")
    return state


def parse_identity(canonical: bytes) -> NamespaceIdentity:
    """Return the identity with these bytes as its `canonical()`. Raises ValueError."""
    fields: dict[str, bytes] = {}
    rest = canonical
    while rest:
        tag_end = 1 + rest[0]
        value_start = tag_end + 4
        value_end = value_start + int.from_bytes(rest[tag_end:value_start], "big")
        if value_end > len(rest):
            raise ValueError("a field of the identity is cut off")
        fields[rest[1:tag_end].decode()] = rest[value_start:value_end]
        rest = rest[value_end:]
    try:
        identity = NamespaceIdentity(
            model_digest=fields["model"],
            adapter_digest=fields["adapter"],
            shard=fields["shard"].decode(),
            domain=fields["domain"].decode(),
            profile_digest=fields.get("profile", b""),
            geometry=Geometry(
                num_layers=int.from_bytes(fields["num_layers"], "big"),
                num_kv_heads=int.from_bytes(fields["num_kv_heads"], "big"),
                head_dim=int.from_bytes(fields["head_dim"], "big"),
                block_tokens=int.from_bytes(fields["block_tokens"], "big"),
                dtype=fields["dtype"].decode(),
                layout=fields["layout"].decode(),
                layers_per_group=int.from_bytes(fields["layers_per_group"], "big"),
                num_planes=int.from_bytes(fields["num_planes"], "big"),
            ),
        )
    except KeyError as error:
        raise ValueError(f"the identity lacks {error}") from error
    if identity.canonical() != canonical:
        raise ValueError("not a canonical identity")
    return identity
