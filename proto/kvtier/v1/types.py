"""The types that client and daemon share: tiers, urgencies, outcomes, geometries, identities of namespaces.

Imports neither protobuf nor numpy, so that the planner and the policies, which are pure, use the same classes
as clients. `Tier` and `Urgency` count from 0, because they index columns; on the wire 0 means
unspecified, and conversions.py is the only place that knows both.
"""

import hashlib
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import ClassVar, NamedTuple

from .arguments import digest as digest_bytes
from .arguments import instance, text, whole
from .errors import InvalidRequest

HASH_BYTES = 32
DTYPE_BYTES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "int8": 1,
}
MAX_GROUPS = 1024  # layer groups of one block
_POSITIVE = ("num_layers", "num_kv_heads", "head_dim", "block_tokens", "num_planes")
_NUMBERS = ("num_layers", "num_kv_heads", "head_dim", "block_tokens", "layers_per_group", "num_planes")


class Tier(int):
    """A memory or a store, as its position in a ladder, fastest first. `a < b` reads "a is faster than b".

    There is one object for each position and name, so `is` compares both. `HBM`, `DRAM` and `NVME` are the
    tiers of a daemon without further memories; with them, nvme is in a later
    position, and `label` tells tiers apart.
    """

    HBM: ClassVar["Tier"]
    DRAM: ClassVar["Tier"]
    NVME: ClassVar["Tier"]
    #: Every tier ever made, by position and name.
    _known: ClassVar[dict[tuple[int, str], "Tier"]] = {}
    label: str  # the tier's name in text

    def __new__(cls, position: int, label: str) -> "Tier":
        """Return the tier at `position` of a ladder, with the name `label`."""
        known = cls._known.get((position, label))
        if known is None:
            known = cls._known[position, label] = int.__new__(cls, position)
            known.label = label
        return known

    def __reduce__(self) -> tuple[type["Tier"], tuple[int, str]]:
        return Tier, (int(self), self.label)

    def __repr__(self) -> str:
        return f"<tier {int(self)}: {self.label}>"


Tier.HBM, Tier.DRAM, Tier.NVME = STANDARD_TIERS = (Tier(0, "hbm"), Tier(1, "dram"), Tier(2, "nvme"))


class TierKind(Enum):
    """How a tier stores bytes."""

    DEVICE = "device"  # memory of an accelerator, or its stand-in on the host
    MEMORY = "memory"  # host memory: extents of slots
    SEGMENTS = "segments"  # a log of records on a block device


class TierInfo(NamedTuple):
    """One tier of a daemon's ladder."""

    tier: Tier
    kind: TierKind | None  # None: one that a newer daemon has and this version does not know


#: The tiers of a daemon without further memories.
STANDARD_LADDER = tuple(map(TierInfo, STANDARD_TIERS, TierKind))


class Urgency(IntEnum):
    """How soon a session needs its blocks, most urgent first. `a < b` reads "a goes before b"."""

    DECODING = 0
    PREFILL = 1
    QUEUED = 2
    WAITING = 3
    IDLE = 4
    ENDED = 5


class PutOutcome(IntEnum):
    """Result of a put for one block. Numbers are those of the wire."""

    NEEDED = 1  # answers Reserve only: room is held, send the bytes
    STORED = 2
    DEDUPLICATED = 3  # was stored before
    IN_PROGRESS = 4  # another put writes the same block
    NO_ROOM = 5
    PARENT_MISSING = 6
    FAILED = 7
    DECLINED = 8  # what is stored is worth more to the appliance than this block

    @property
    def is_kept(self) -> bool:
        """Whether the block is stored now, or is about to be."""
        return self in (PutOutcome.STORED, PutOutcome.DEDUPLICATED, PutOutcome.IN_PROGRESS)


@dataclass(frozen=True, slots=True)
class Geometry:
    """Shape of the KV of one block of one shard.

    `layout` says how elements are ordered inside a fragment; the daemon only compares it. Raises
    InvalidRequest when a field is out of range.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_tokens: int
    dtype: str
    layout: str = "layer,kv,token,head,dim"
    layers_per_group: int = 0  # consecutive layers that move together; 0: all of them
    num_planes: int = 2  # K and V; 1 for a joint latent (MLA)
    #: Bytes of each layer group's fragment; the last group may be shorter.
    fragment_bytes: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in (*_POSITIVE, "layers_per_group"):
            whole(name, getattr(self, name))
        for name in ("dtype", "layout"):
            text(name, getattr(self, name))
        for name in _POSITIVE:
            if not 0 < getattr(self, name) <= 1 << 20:
                raise _bad(f"{name} must be between 1 and 1048576, is {getattr(self, name)}")
        if self.dtype not in DTYPE_BYTES:
            raise _bad(f"unknown dtype {self.dtype!r}; use one of {', '.join(DTYPE_BYTES)}")
        if not 0 <= self.layers_per_group <= self.num_layers:
            raise _bad(
                f"layers_per_group must be between 0 and num_layers ({self.num_layers}), "
                f"is {self.layers_per_group}"
            )
        if self.num_groups > MAX_GROUPS:
            raise _bad(f"{self.num_groups} layer groups; raise layers_per_group, limit {MAX_GROUPS}")
        sizes = tuple(len(self.layers_of(group)) * self.layer_bytes for group in range(self.num_groups))
        object.__setattr__(self, "fragment_bytes", sizes)

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer of one block."""
        elements = self.num_planes * self.block_tokens * self.num_kv_heads * self.head_dim
        return elements * DTYPE_BYTES[self.dtype]

    @property
    def num_groups(self) -> int:
        """Layer groups, that is fragments in one block."""
        return -(-self.num_layers // (self.layers_per_group or self.num_layers))

    def layers_of(self, group: int) -> range:
        """Return the layers of layer group `group`; the last group may be shorter."""
        step = self.layers_per_group or self.num_layers
        return range(group * step, min((group + 1) * step, self.num_layers))

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, all layers."""
        return self.num_layers * self.layer_bytes


@dataclass(frozen=True, slots=True)
class NamespaceIdentity:
    """Everything that must agree before bytes may be shared.

    `model_digest` is of the weights; `adapter_digest` of the LoRA's content, empty when there is none;
    `profile_digest` names what the KV may lose in the cold store (`kvtier calibrate` prints it), and is empty
    when every bit has to come back. Raises InvalidRequest when a digest has the wrong length.
    """

    model_digest: bytes
    geometry: Geometry
    adapter_digest: bytes = b""
    shard: str = ""  # e.g. "tp=0/2,pp=0/1"
    domain: str = ""  # isolation domain; empty: the client's own
    profile_digest: bytes = b""  # of a compression profile the daemon has
    #: 32 bytes that name the namespace: SHA-256 of all fields, as docs/prefix-hash.md specifies. The daemon's
    #: name for it, too, unless the daemon has replaced `domain`.
    digest: bytes = field(init=False, repr=False)

    def __post_init__(self) -> None:
        instance("geometry", self.geometry, Geometry)
        for name in ("shard", "domain"):
            text(name, getattr(self, name))
        for name in ("model_digest", "adapter_digest", "profile_digest"):
            digest_bytes(name, getattr(self, name))
        if not 16 <= len(self.model_digest) <= 64:
            raise _bad(
                f"model_digest must be 16 to 64 bytes, is {len(self.model_digest)}; "
                "use a SHA-256 of the weights or of their names and revisions"
            )
        if self.adapter_digest and not 16 <= len(self.adapter_digest) <= 64:
            raise _bad(f"adapter_digest must be empty or 16 to 64 bytes, is {len(self.adapter_digest)}")
        if len(self.profile_digest) not in (0, 32):
            raise _bad(f"profile_digest must be empty or 32 bytes, is {len(self.profile_digest)}")
        object.__setattr__(self, "digest", hashlib.sha256(self.canonical()).digest())

    def canonical(self) -> bytes:
        """Return the identity as tagged, length-prefixed bytes, which no other identity has."""
        geometry = self.geometry
        fields = [
            ("model", self.model_digest),
            ("adapter", self.adapter_digest),
            ("shard", self.shard.encode()),
            ("domain", self.domain.encode()),
            ("dtype", geometry.dtype.encode()),
            ("layout", geometry.layout.encode()),
            *((name, getattr(geometry, name).to_bytes(4, "big")) for name in _NUMBERS),
        ]
        if self.profile_digest:  # last, and only then: digests of namespaces without one do not change
            fields.append(("profile", self.profile_digest))
        return b"".join(
            bytes([len(tag)]) + tag.encode() + len(value).to_bytes(4, "big") + value for tag, value in fields
        )


def _bad(message: str) -> InvalidRequest:
    return InvalidRequest(message, reason="BAD_NAMESPACE")
