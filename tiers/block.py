"""The words everybody shares: tiers, urgencies, geometries, namespaces, fragment labels.

The ground floor of the house: imports nothing of ours and nothing heavy, so that the planner and the
policies, which are pure, can use the same words as the code that moves bytes.
"""

import hashlib
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final

HASH_BYTES = 32
NO_PLACE = -1  # a place is a non-negative number whose meaning belongs to its tier

DTYPE_BYTES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "int8": 1,
}


class Tier(IntEnum):
    """Where bytes live, fastest first. `a < b` reads "a is faster than b"."""

    HBM = 0
    DRAM = 1
    NVME = 2
    OBJECT = 3

    @property
    def label(self) -> str:
        """The tier's name in text: `hbm`, `dram`, `nvme`, `object`."""
        return self.name.lower()


class Urgency(IntEnum):
    """How soon a session needs its blocks, most urgent first. `a < b` reads "a goes before b"."""

    DECODING = 0
    PREFILL = 1
    QUEUED = 2
    WAITING = 3
    IDLE = 4
    ENDED = 5


#: Stands in place of an urgency for blocks that were last used without a session, or before the start.
NO_SESSION: Final = len(Urgency)


def tenant_of(domain: str) -> str:
    """Return the part of an isolation domain's name that names its tenant: of `tenant:acme/eu`,
    `tenant:acme`."""
    return domain.partition("/")[0]


@dataclass(frozen=True, slots=True)
class Geometry:
    """Shape of the KV of one block. Part of the namespace's identity.

    Raises ValueError, saying the fix, when a field is out of range.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_tokens: int
    dtype: str
    layout: str = "layer,kv,token,head,dim"
    layers_per_group: int = 0  # 0: all layers in one group
    num_planes: int = 2  # K and V; 1 for a joint latent (MLA)

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim", "block_tokens", "num_planes"):
            if not 0 < getattr(self, name) <= 1 << 20:
                raise ValueError(f"{name} must be between 1 and 1048576, is {getattr(self, name)}")
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"unknown dtype {self.dtype!r}; known: {', '.join(DTYPE_BYTES)}")
        if not 0 <= self.layers_per_group <= self.num_layers:
            raise ValueError(
                f"layers_per_group must be between 0 and num_layers ({self.num_layers}), "
                f"is {self.layers_per_group}"
            )
        if self.num_groups > 1024:
            raise ValueError(f"{self.num_groups} layer groups; raise layers_per_group, limit 1024")

    @property
    def num_groups(self) -> int:
        """Number of layer groups, that is of fragments in one block."""
        return -(-self.num_layers // (self.layers_per_group or self.num_layers))

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer of one block."""
        elements = self.num_planes * self.block_tokens * self.num_kv_heads * self.head_dim
        return elements * DTYPE_BYTES[self.dtype]

    def layers_of(self, group: int) -> range:
        """Return the layers of layer group `group`; the last group may be shorter."""
        step = self.layers_per_group or self.num_layers
        return range(group * step, min((group + 1) * step, self.num_layers))

    def fragment_bytes(self, group: int) -> int:
        """Return the raw bytes of the fragment of layer group `group`."""
        return len(self.layers_of(group)) * self.layer_bytes

    @property
    def block_bytes(self) -> int:
        """Raw bytes of one block, all layers."""
        return self.num_layers * self.layer_bytes


@dataclass(frozen=True, slots=True)
class NamespaceIdentity:
    """Everything that must agree before bytes may be shared.

    A profile says what its KV may lose in the cold store; without one it loses nothing. It is part of the
    identity, because who agreed to nothing must not be served what was shortened for somebody else. Raises
    ValueError when a digest is not 16 to 64 bytes (the adapter's may be empty, the profile's has 32 or none).
    """

    model_digest: bytes
    geometry: Geometry
    adapter_digest: bytes = b""
    shard: str = ""
    domain: str = ""
    profile_digest: bytes = b""
    digest: bytes = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not 16 <= len(self.model_digest) <= 64:
            raise ValueError(f"model_digest must be 16 to 64 bytes, is {len(self.model_digest)}")
        if self.adapter_digest and not 16 <= len(self.adapter_digest) <= 64:
            raise ValueError(f"adapter_digest must be empty or 16 to 64 bytes, is {len(self.adapter_digest)}")
        if len(self.profile_digest) not in (0, HASH_BYTES):
            raise ValueError(f"profile_digest must be empty or 32 bytes, is {len(self.profile_digest)}")
        object.__setattr__(self, "digest", hashlib.sha256(self.canonical()).digest())

    def canonical(self) -> bytes:
        """Return the identity as tagged, length-prefixed bytes: injective, so no two identities meet."""
        geometry = self.geometry
        fields: list[tuple[bytes, bytes]] = [
            (b"model", self.model_digest),
            (b"adapter", self.adapter_digest),
            (b"shard", self.shard.encode()),
            (b"domain", self.domain.encode()),
            (b"dtype", geometry.dtype.encode()),
            (b"layout", geometry.layout.encode()),
        ]
        for name in (
            "num_layers",
            "num_kv_heads",
            "head_dim",
            "block_tokens",
            "layers_per_group",
            "num_planes",
        ):
            fields.append((name.encode(), getattr(geometry, name).to_bytes(4, "big")))
        if self.profile_digest:  # last and only then: digests of namespaces without one are as ever
            fields.append((b"profile", self.profile_digest))
        return b"".join(
            len(tag).to_bytes(1, "big") + tag + len(value).to_bytes(4, "big") + value for tag, value in fields
        )


@dataclass(slots=True, unsafe_hash=True)
class FragmentLabel:
    """Who a fragment is: what every record and slot header says, and what every read compares.

    Not changed after its checksum was set. Not `frozen`, because that triples the cost of making one, and
    one is made for every fragment that moves.
    """

    namespace_digest: bytes  # 32 bytes
    namespace_id: int  # short name, valid for one life of the daemon
    prefix_hash: bytes  # 32 bytes
    parent_hash: bytes  # 32 bytes; empty at the start of a chain
    position: int  # of the block in its chain, from 0
    group: int  # layer group
    raw_length: int  # bytes before encoding
    checksum: bytes = b""  # xxh3-128 of the raw payload, 16 bytes; empty until it was taken, at put
    codec_id: int = 0  # of its record in the cold store, and
    stored_length: int = 0  # the bytes that takes there; 0: as it is, raw_length
    is_spent: bool = False  # the payload was decoded from a lossy record: it loses nothing more
