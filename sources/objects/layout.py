"""Layout of a bundle: its head, and where each fragment stands. docs/bundle-format.md specifies it.

    | head: 136 bytes, names, entries, envelopes, hash | payloads, group by group, each at a multiple of 64 |

A bundle is consecutive blocks of one chain. Its payloads are *group-major*: all blocks' first layers, then
all blocks' next, so that the layers which a runtime needs first are one range, and arrive first.
The head stands before them: a writer knows all lengths before it sends a byte, and a reader needs no second
request to learn what is where. It reads from the start, and has the first layers while the last are on their
way. Rejected: a footer, as segments have one (another request, or all bytes, before the first fragment can be
used); a header page of 4 KiB for each record (a tenth of a bundle with small fragments).

Offsets are not stored: they follow from the lengths. What a head says is believed after its xxh3-128 has
matched, and then only within the limits below: a store, and what travels, may be damaged or hostile.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from ...tiers.block import HASH_BYTES, FragmentLabel, Geometry
from ...tiers.codecs.base import PROFILED_ID
from ...tiers.codecs.registry import KNOWN_CODECS
from ...tiers.encryption.envelope import ENVELOPE_BYTES
from ...v1.bundles import MAX_FRAGMENTS

Entries: TypeAlias = npt.NDArray[np.void]  # dtype ENTRY

MAGIC: Final = b"kvtbundl"
VERSION: Final = 1
ENCRYPTED: Final = 1
HIDDEN: Final = 2
INCOMPAT_FEATURES: Final = ENCRYPTED | HIDDEN  # a reader must refuse bits it does not know
HAS_PARENT: Final = 1  # flags of the head, and of an entry: a reader ignores those it does not know
IS_SPENT: Final = 1
ALIGNMENT: Final = 64
MAX_BUNDLE_BYTES: Final = 1 << 30

# magic, version, incompat, flags, blocks, groups, position, key, bundle bytes, namespace, parent, profile
_FIXED = struct.Struct("<8sHHIIIIIQ32s32s32s")
FIXED_BYTES: Final = _FIXED.size
HASH_OF_HEAD_BYTES: Final = 16
#: One fragment: xxh3-128 of the raw payload (zeros when it is encrypted), and of the payload as it is here.
ENTRY: Final = np.dtype(
    [
        ("checksum", "V16"),
        ("stored_checksum", "V16"),
        ("raw_length", "<u4"),
        ("stored_length", "<u4"),
        ("codec", "<u2"),
        ("flags", "<u2"),
        ("reserved", "<u4"),
    ]
)
#: The longest head that can be.
MAX_HEAD_BYTES: Final = (
    FIXED_BYTES + HASH_OF_HEAD_BYTES + MAX_FRAGMENTS * (HASH_BYTES + ENTRY.itemsize + ENVELOPE_BYTES)
)

assert FIXED_BYTES == 136
assert ENTRY.itemsize == 48


class BundleError(ValueError):
    """These bytes are not a bundle, or not the one that was asked for. The message says what is wrong."""


class BundleChain(NamedTuple):
    """The blocks of a bundle: consecutive ones of a chain, in one namespace."""

    namespace_digest: bytes  # 32 bytes
    parent_hash: bytes  # 32 bytes; empty at the start of a chain
    position: int  # of the first block in its chain
    names: tuple[bytes, ...]  # prefix hash of each block
    profile_digest: bytes = b""  # of the namespace, 32 bytes; empty: it names none
    is_hidden: bool = False  # digest and hashes are keyed hashes of themselves (hidden.py)


@dataclass(frozen=True, slots=True, eq=False)
class BundleHead:
    """What stands before the payloads. Fragment `group * len(chain.names) + block` is the index of `entries`.

    `entries`: (n,) ENTRY; `starts`: (n,) int64, bytes from the start of the bundle; `envelopes`: packed, one
    a fragment, empty unless `key`, the id of the tenant's data key, is set.
    """

    chain: BundleChain
    num_groups: int
    entries: Entries
    envelopes: bytes
    key: int
    starts: npt.NDArray[np.int64]
    total_bytes: int

    @property
    def num_blocks(self) -> int:
        """Blocks of the bundle."""
        return len(self.chain.names)

    def index(self, group: int, block: int) -> int:
        """Return the index of a fragment. `block` counts within the bundle."""
        return group * self.num_blocks + block

    def envelope(self, index: int) -> bytes:
        """Return the packed envelope of a fragment; empty when it is not encrypted."""
        return self.envelopes[index * ENVELOPE_BYTES : (index + 1) * ENVELOPE_BYTES]

    def span(self, group: int, block: int) -> tuple[int, int]:
        """Return where the payload of a fragment starts and ends."""
        index = self.index(group, block)
        start = int(self.starts[index])
        return start, start + int(self.entries["stored_length"][index])

    def span_of_groups(self, first: int, end: int) -> tuple[int, int]:
        """Return where the payloads of layer groups `first` to `end`, exclusive, start and end."""
        return self.span(first, 0)[0], self.span(end - 1, self.num_blocks - 1)[1]

    def label(self, group: int, block: int) -> FragmentLabel:
        """Return the identity of a fragment, as every tier knows it; `namespace_id` is 0."""
        entry = self.entries[self.index(group, block)]
        names = self.chain.names
        return FragmentLabel(
            namespace_digest=self.chain.namespace_digest,
            namespace_id=0,
            prefix_hash=names[block],
            parent_hash=names[block - 1] if block else self.chain.parent_hash,
            position=self.chain.position + block,
            group=group,
            raw_length=int(entry["raw_length"]),
            checksum=b"" if self.key else entry["checksum"].tobytes(),
            codec_id=int(entry["codec"]),
            stored_length=int(entry["stored_length"]),
            is_spent=bool(entry["flags"] & IS_SPENT),
        )

    def require(self, chain: BundleChain, geometry: Geometry) -> None:
        """Raise BundleError unless this is the bundle of `chain`, its fragments as `geometry` says."""
        if self.chain != chain:
            part = next(
                name
                for name, mine, asked in zip(BundleChain._fields, self.chain, chain, strict=True)
                if mine != asked
            )
            raise BundleError(f"it is another bundle: its {part} is not the one that was asked for")
        lengths = np.repeat(np.array(geometry.fragment_bytes, np.int64), self.num_blocks)
        if not np.array_equal(self.entries["raw_length"], lengths):
            raise BundleError("its fragments do not have the lengths of its namespace")


def head_bytes(num_blocks: int, num_groups: int, *, is_encrypted: bool) -> int:
    """Return the length of a head."""
    num_fragments = num_blocks * num_groups
    tables = num_blocks * HASH_BYTES + num_fragments * (ENTRY.itemsize + is_encrypted * ENVELOPE_BYTES)
    return FIXED_BYTES + tables + HASH_OF_HEAD_BYTES


def starts_of(
    stored_lengths: npt.NDArray[np.int64], length_of_head: int
) -> tuple[npt.NDArray[np.int64], int]:
    """Return the start of each payload, (n,) int64, and the length of the bundle."""
    rounded = -(-stored_lengths // ALIGNMENT) * ALIGNMENT
    first = -(-length_of_head // ALIGNMENT) * ALIGNMENT
    starts = first + np.cumsum(rounded) - rounded
    return starts, int(starts[-1] + stored_lengths[-1])


def make_head(
    chain: BundleChain, num_groups: int, entries: Entries, envelopes: Sequence[bytes] = (), key: int = 0
) -> BundleHead:
    """Return the head of a bundle that is to be written. Raises BundleError beyond the limits."""
    if not all(len(name) == HASH_BYTES for name in chain.names):
        raise BundleError("a block has a name that is not 32 bytes long")
    length = head_bytes(len(chain.names), num_groups, is_encrypted=key != 0)
    _check_counts(len(chain.names), num_groups)
    if chain.is_hidden and not key:
        raise BundleError("hidden names without a key")
    if len(entries) != len(chain.names) * num_groups or len(envelopes) != (len(entries) if key else 0):
        raise BundleError(f"{len(entries)} fragments and {len(envelopes)} envelopes for {chain.position}")
    _check_entries(entries, chain.profile_digest)
    starts, total_bytes = starts_of(entries["stored_length"].astype(np.int64), length)
    if total_bytes > MAX_BUNDLE_BYTES:
        raise BundleError(f"{total_bytes} bytes; a bundle has at most {MAX_BUNDLE_BYTES}")
    return BundleHead(chain, num_groups, entries, b"".join(envelopes), key, starts, total_bytes)


def pack_head(head: BundleHead) -> bytes:
    """Return the bytes of a head."""
    chain = head.chain
    fixed = _FIXED.pack(
        MAGIC,
        VERSION,
        (ENCRYPTED if head.key else 0) | (HIDDEN if chain.is_hidden else 0),
        HAS_PARENT if chain.parent_hash else 0,
        len(chain.names),
        head.num_groups,
        chain.position,
        head.key,
        head.total_bytes,
        chain.namespace_digest,
        chain.parent_hash,
        chain.profile_digest,
    )
    packed = fixed + b"".join(chain.names) + head.entries.tobytes() + head.envelopes
    return packed + xxhash.xxh3_128_digest(packed)


def measure_head(start: bytes | memoryview) -> int:
    """Return the length of the head of a bundle that begins with `start`, at least FIXED_BYTES.

    At most MAX_HEAD_BYTES; nothing else of it is believed yet. Raises BundleError.
    """
    if len(start) < FIXED_BYTES:
        raise BundleError(f"{len(start)} bytes cannot hold a bundle")
    magic, version, incompat, _, num_blocks, num_groups, *_ = _FIXED.unpack_from(start)
    if magic != MAGIC:
        raise BundleError("it is no bundle: it does not begin with 'kvtbundl'")
    if version != VERSION or incompat & ~INCOMPAT_FEATURES:
        raise BundleError(
            f"format version {version}, incompatible features {incompat:#x}; a newer kvtier reads it"
        )
    _check_counts(num_blocks, num_groups)
    return head_bytes(num_blocks, num_groups, is_encrypted=bool(incompat & ENCRYPTED))


def unpack_head(buffer: bytes | memoryview) -> BundleHead:
    """Return the head that `buffer` begins with, copied. Raises BundleError."""
    length = measure_head(buffer)
    if len(buffer) < length:
        raise BundleError(f"{len(buffer)} bytes of a head of {length}")
    packed = bytes(buffer[: length - HASH_OF_HEAD_BYTES])
    if xxhash.xxh3_128_digest(packed) != bytes(buffer[length - HASH_OF_HEAD_BYTES : length]):
        raise BundleError("its head is damaged: the hash does not match")
    fields = _FIXED.unpack_from(packed)
    _, _, incompat, flags, num_blocks, num_groups, position, key, total_bytes, namespace, parent, profile = (
        fields
    )
    if bool(key) != bool(incompat & ENCRYPTED):
        raise BundleError("a key without envelopes, or the other way round")
    if incompat & HIDDEN and not key:
        raise BundleError("hidden names without a key")
    end = FIXED_BYTES + num_blocks * HASH_BYTES
    names = tuple(packed[at : at + HASH_BYTES] for at in range(FIXED_BYTES, end, HASH_BYTES))
    chain = BundleChain(
        namespace,
        parent if flags & HAS_PARENT else b"",
        position,
        names,
        profile if any(profile) else b"",
        bool(incompat & HIDDEN),
    )
    num_fragments = num_blocks * num_groups
    entries = np.frombuffer(packed, ENTRY, num_fragments, end)
    _check_entries(entries, chain.profile_digest)
    if not key and ((entries["codec"] == 0) & (entries["checksum"] != entries["stored_checksum"])).any():
        raise BundleError("a raw fragment has two hashes")
    starts, length_by_entries = starts_of(entries["stored_length"].astype(np.int64), length)
    if total_bytes != length_by_entries or total_bytes > MAX_BUNDLE_BYTES:
        raise BundleError(f"{total_bytes} bytes announced, {length_by_entries} by its fragments")
    envelopes = packed[end + num_fragments * ENTRY.itemsize :]
    return BundleHead(chain, num_groups, entries, envelopes, key, starts, total_bytes)


def _check_counts(num_blocks: int, num_groups: int) -> None:
    if not (num_blocks and num_groups and num_blocks * num_groups <= MAX_FRAGMENTS):
        raise BundleError(
            f"{num_blocks} blocks of {num_groups} layer groups; at most {MAX_FRAGMENTS} fragments"
        )


def _check_entries(entries: Entries, profile_digest: bytes) -> None:
    """Raise BundleError unless lengths and codecs are possible."""
    raw, stored, codecs = entries["raw_length"], entries["stored_length"], entries["codec"]
    if not ((stored > 0) & (stored <= raw) & (raw <= MAX_BUNDLE_BYTES)).all():
        raise BundleError("a fragment has an impossible length")
    if not ((codecs != 0) | (stored == raw)).all():
        raise BundleError("a fragment without codec has two lengths")
    if not np.isin(codecs, list(KNOWN_CODECS)).all():
        raise BundleError(f"a fragment has codec {codecs.max()}; a newer kvtier reads it")
    if not profile_digest and (codecs == PROFILED_ID).any():
        raise BundleError("a lossy fragment in a namespace that names no profile")
