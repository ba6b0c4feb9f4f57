"""What the tests of encryption share: two tenants, payloads that can be found on a disk."""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import xxhash

from kvtier.appliance.transfer.forward import ForwardCopier
from kvtier.tiers.base import CopyItem, CopyOutcome
from kvtier.tiers.block import FragmentLabel, Geometry, NamespaceIdentity
from kvtier.tiers.codecs.base import shape_of
from kvtier.tiers.codecs.registry import codec_named
from kvtier.tiers.cold.record import RecordHeader, unpack_header
from kvtier.tiers.cold.segment_files import segment_path
from kvtier.v1.shm import PAGE_BYTES
from tests.tiers.cold.store import Cold, in_slot

MASTER = bytes(range(32))
GEOMETRY = Geometry(4, 2, 64, 16, "bfloat16")
RED = NamespaceIdentity(b"r" * 32, GEOMETRY, domain="tenant:red")
RED_EU = NamespaceIdentity(b"r" * 32, GEOMETRY, domain="tenant:red/eu")
BLUE = NamespaceIdentity(b"b" * 32, GEOMETRY, domain="tenant:blue")
NAMESPACES = [RED, RED_EU, BLUE]
SHAPE = shape_of(GEOMETRY, 0)
PLANTED = b"the patient's name is Anna Blume; "


def payload_of(number: int, length: int = 9000) -> bytes:
    """Return a payload with the planted text all over it."""
    return (b"%d %b" % (number, PLANTED) * (length // 30))[:length]


def label_of(
    number: int, payload: bytes, namespace: NamespaceIdentity, codec: str = "identity"
) -> FragmentLabel:
    chosen = codec_named(codec)
    return FragmentLabel(
        namespace_digest=namespace.digest,
        namespace_id=NAMESPACES.index(namespace) + 1,
        prefix_hash=hashlib.sha256(b"encrypted %d" % number).digest(),
        parent_hash=b"",
        position=number,
        group=0,
        raw_length=len(payload),
        checksum=xxhash.xxh3_128_digest(payload),
        codec_id=chosen.codec_id,
        stored_length=chosen.stored_bound(SHAPE) if chosen.codec_id else 0,
    )


def put(opened: Cold, *items: tuple[FragmentLabel, bytes]) -> list[int]:
    """Write records in one batch, in page-aligned slots; return their places."""
    batch = []
    for label, payload in items:
        identity = next(one for one in NAMESPACES if one.digest == label.namespace_digest)
        opened.store.store_namespace(identity)
        place = opened.room.reserve(0, label.stored_length or label.raw_length)
        assert place is not None
        batch.append((place, label, in_slot(payload)))
    for (place, label, view), outcome in zip(batch, opened.store.write_batch(batch), strict=True):
        assert outcome == CopyOutcome(None, xxhash.xxh3_128_digest(view))
        opened.room.settle(place)
        opened.accepted[place] = (label, bytes(view))
    return [place for place, _, _ in batch]


def put_plain(opened: Cold, namespace: NamespaceIdentity, *numbers: int, length: int = 9000) -> list[int]:
    payloads = [payload_of(number, length) for number in numbers]
    items = [(label_of(n, p, namespace), p) for n, p in zip(numbers, payloads, strict=True)]
    return put(opened, *items)


def on_disk(directory: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(directory.iterdir()))


def forward(opened: Cold, place: int, label: FragmentLabel) -> int:
    target = opened.room.reserve(0, label.stored_length or label.raw_length, forward=True)
    assert target is not None
    with ThreadPoolExecutor(1) as pool:
        outcomes = ForwardCopier(opened.store, pool).start([CopyItem(place, target, label)]).result()
    assert outcomes[0].cause is None
    opened.room.settle(target)
    return target


def header_at(opened: Cold, place: int) -> RecordHeader:
    data = segment_path(opened.store.directory, place >> 32).read_bytes()
    return unpack_header(data[(place & 0xFFFF_FFFF) * PAGE_BYTES :][:PAGE_BYTES])
