"""One record of the cold store: a header page that says everything about the payload behind it.

    | header page, 4 KiB | payload, stored_length bytes | zeros up to the next page |

A record describes itself completely, so a segment without a footer, or with a damaged one, is read back
from its headers alone. The middle of the header, `ENTRY_BYTES` wide, is at the same time the record's
entry in the segment's footer: packing a header packs the entry, and reading footers and scanning headers
yield the same array. A separate, denser footer entry was rejected: a second format to keep in step, for
32 bytes a record.

What keeps a record from being taken for another one: its segment, the random epoch of the segment's
present life, and its own page, all under the header's CRC32C; then namespace and prefix hash; then the
xxh3-128 of the raw payload, taken once, at put.

An encrypted record has a longer header, with the envelope (envelope.py) behind everything else, and zeros for
the checksum, which is in the envelope. Readers from before there were any refuse it by its incompat bit; the
footer and the manifest have the same bit for the same reason.
"""

import struct
from typing import NamedTuple

import google_crc32c
import numpy as np

from ...v1.shm import CHECKSUM_BYTES, HASH_BYTES, PAGE_BYTES
from ..encryption.envelope import ENVELOPE_BYTES
from .log import record_bytes

MAGIC = b"kvtrecrd"
VERSION = 1
COMPAT_FEATURES = 0  # a reader may ignore compat bits it does not know
ENCRYPTED = 1
INCOMPAT_FEATURES = ENCRYPTED  # but must refuse records with an incompat bit it does not know
CODEC_IDENTITY = 0

# magic, version, header bytes, compat, incompat, segment, epoch, owner epoch, record bytes, namespace
_PROLOGUE = struct.Struct("<8sHHIIIQQQ32s")
# prefix, parent, checksum, sequence, raw length, stored length, page, position, group, namespace index,
# codec, flags, key
_ENTRY = struct.Struct("<32s32s16sQQQIIIIHHI")
# codec parameters, xxh3-64 of the payload as it stands here, if that is not the raw payload
_EPILOGUE = struct.Struct("<32sQ4x")
_HEADER = struct.Struct("<" + (_PROLOGUE.format + _ENTRY.format + _EPILOGUE.format).replace("<", ""))
_CRC = struct.Struct("<I")

ENTRY_OFFSET = _PROLOGUE.size
ENTRY_BYTES = _ENTRY.size
HEADER_BYTES = _HEADER.size + _CRC.size  # of this version; a later one may be longer, up to a page
#: Flags of an entry.
HAS_PARENT = 1
IS_SPENT = 2  # decoded from a lossy record before it was written: see FragmentLabel

#: The same bytes as an array: what footers hold and recovery works on.
ENTRY = np.dtype(
    [
        ("prefix_hash", "V32"),
        ("parent_hash", "V32"),
        ("checksum", "V16"),
        ("sequence", "<u8"),
        ("raw_length", "<u8"),
        ("stored_length", "<u8"),
        ("page", "<u4"),
        ("position", "<u4"),
        ("group", "<u4"),
        ("namespace_index", "<u4"),
        ("codec", "<u2"),
        ("flags", "<u2"),
        ("key", "<u4"),
    ]
)
#: What finds header pages in a segment without parsing them one by one.
PAGE_PROLOGUE = np.dtype(
    {
        "names": ["magic", "segment", "epoch", "page"],
        "formats": ["<u8", "<u4", "<u8", "<u4"],
        "offsets": [0, 20, 24, ENTRY_OFFSET + 104],
        "itemsize": PAGE_BYTES,
    }
)
MAGIC_WORD = int.from_bytes(MAGIC, "little")

assert ENTRY.itemsize == ENTRY_BYTES == 128
assert HEADER_BYTES == 256
assert CHECKSUM_BYTES == 16
_NO_PARENT = bytes(HASH_BYTES)
_NO_CHECKSUM = bytes(CHECKSUM_BYTES)
# What a fragment asks for, and what an encrypted payload is bound to: namespace, prefix, parent, raw length,
# stored length, position, group, codec, flags, codec parameters.
_IDENTITY = struct.Struct("<32s32s32sQQIIHH32s")


class RecordError(ValueError):
    """These bytes are not a record header of a version we read; the message says what is wrong."""


class RecordHeader(NamedTuple):
    """Contents of a header page, in the order in which they are packed.

    Lengths in bytes; `page` is the record's own, in its segment.
    """

    segment: int
    epoch: int  # of the segment's present life, random
    owner_epoch: int  # of the process that wrote it
    namespace_digest: bytes
    prefix_hash: bytes
    parent_hash: bytes  # empty at the start of a chain
    checksum: bytes  # xxh3-128 of the raw payload; empty when the payload is encrypted
    sequence: int  # grows with every record ever written by any owner
    raw_length: int
    stored_length: int
    page: int
    position: int
    group: int
    namespace_index: int  # in the segment's own table of namespaces
    codec: int = CODEC_IDENTITY
    codec_parameters: bytes = b""
    stored_hash: int = 0  # xxh3-64 of the encoded or encrypted payload; 0 when `checksum` says it all
    is_spent: bool = False
    key: int = 0  # id of the key it is encrypted with; 0: it is not
    envelope: bytes = b""  # ENVELOPE_BYTES, if it is

    @property
    def flags(self) -> int:
        """The flags of the entry."""
        return (HAS_PARENT if self.parent_hash else 0) | (IS_SPENT if self.is_spent else 0)

    def identity(self) -> bytes:
        """Return which fragment this is and in which form, without its place and time."""
        return _IDENTITY.pack(
            self.namespace_digest,
            self.prefix_hash,
            self.parent_hash,
            self.raw_length,
            self.stored_length,
            self.position,
            self.group,
            self.codec,
            self.flags & HAS_PARENT,  # what else a flag says is noted again when a record is copied forward
            self.codec_parameters,
        )


def pack_header(page: memoryview, header: RecordHeader) -> bytes:
    """Write `header` into the first bytes of `page`; return the footer entry of the record.

    It takes HEADER_BYTES and the envelope; the rest of `page` is the caller's to keep zero.
    """
    assert len(header.envelope) == (ENVELOPE_BYTES if header.key else 0)
    packed = _HEADER.pack(
        MAGIC,
        VERSION,
        HEADER_BYTES + len(header.envelope),
        COMPAT_FEATURES,
        ENCRYPTED if header.key else 0,
        *header[:3],  # segment and epochs
        record_bytes(header.stored_length),
        *header[3:5],  # namespace and prefix
        header.parent_hash or _NO_PARENT,
        header.checksum or _NO_CHECKSUM,
        *header[7:15],  # sequence to codec
        header.flags,
        header.key,
        header.codec_parameters,
        header.stored_hash,
    )
    head = packed + header.envelope
    page[: len(head) + _CRC.size] = head + _CRC.pack(google_crc32c.value(head))
    return packed[ENTRY_OFFSET : ENTRY_OFFSET + ENTRY_BYTES]


def unpack_header(page: bytes | bytearray | memoryview) -> RecordHeader:
    """Return the header in `page`. Raises RecordError.

    No length in it is believed before the CRC was checked, nor after it beyond what the version allows.
    """
    if len(page) < HEADER_BYTES:
        raise RecordError(f"{len(page)} bytes cannot hold a header")
    head = bytes(page[:HEADER_BYTES])
    if head[:8] != MAGIC:
        raise RecordError("no record starts here")
    fields = _HEADER.unpack_from(head)
    version, header_bytes, incompat = fields[1], fields[2], fields[4]
    if not HEADER_BYTES <= header_bytes <= min(len(page), PAGE_BYTES):
        raise RecordError(f"header of {header_bytes} bytes")
    if header_bytes > HEADER_BYTES:
        head = bytes(page[:header_bytes])
    if google_crc32c.value(head[: -_CRC.size]) != _CRC.unpack_from(head, len(head) - _CRC.size)[0]:
        raise RecordError("header CRC does not match")
    if version != VERSION or incompat & ~INCOMPAT_FEATURES:
        raise RecordError(f"format version {version}, incompatible features {incompat:#x}")
    record_length, raw_length, stored_length, flags, key = fields[8], *fields[14:16], *fields[21:23]
    envelope = head[_HEADER.size : _HEADER.size + ENVELOPE_BYTES] if incompat & ENCRYPTED else b""
    if bool(key) != bool(envelope) or (envelope and header_bytes < HEADER_BYTES + ENVELOPE_BYTES):
        raise RecordError("a key without an envelope, or the other way round")
    # Bounded before the arithmetic: 32-bit page numbers address at most 2**44 bytes.
    if not 0 < stored_length < 1 << 44 or not 0 < raw_length < 1 << 44:
        raise RecordError(f"payload of {stored_length} stored, {raw_length} raw bytes")
    if record_length != record_bytes(stored_length):
        raise RecordError(f"record of {record_length} bytes for {stored_length} of payload")
    values = (
        *fields[5:8],  # segment and epochs
        *fields[9:11],  # namespace and prefix
        fields[11] if flags & HAS_PARENT else b"",
        b"" if key else fields[12],
        *fields[13:21],  # sequence to codec
        fields[23].rstrip(b"\0"),
        fields[24],
        bool(flags & IS_SPENT),
        key,
        envelope,
    )
    return RecordHeader._make(values)
