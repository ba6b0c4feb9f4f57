"""Namespaces as the client sees them: what is registered, and what registering it gives.

The value objects mirror NamespaceIdentity and Geometry of types.proto field by field. They check ranges
here, before anything is sent, because a message that names the fix is worth most next to the mistake.
"""

import hashlib
from dataclasses import dataclass
from itertools import accumulate

from ...v1 import types_pb2
from ..errors import InvalidRequest
from .arguments import digest, instance, text, whole
from .words import PrefillSpeed

DTYPE_BYTES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "int8": 1,
}
_POSITIVE = ("num_layers", "num_kv_heads", "head_dim", "block_tokens", "num_planes")
_NUMBERS = ("num_layers", "num_kv_heads", "head_dim", "block_tokens", "layers_per_group", "num_planes")


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

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer of one block."""
        elements = self.num_planes * self.block_tokens * self.num_kv_heads * self.head_dim
        return elements * DTYPE_BYTES[self.dtype]

    @property
    def num_groups(self) -> int:
        """Layer groups, that is fragments in one block."""
        return -(-self.num_layers // (self.layers_per_group or self.num_layers))

    @property
    def fragment_bytes(self) -> tuple[int, ...]:
        """Bytes of each layer group's fragment; the last group may be shorter."""
        step = self.layers_per_group or self.num_layers
        return tuple(
            min(step, self.num_layers - first) * self.layer_bytes for first in range(0, self.num_layers, step)
        )

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

    def __post_init__(self) -> None:
        instance("geometry", self.geometry, Geometry)
        for name in ("shard", "domain"):
            text(name, getattr(self, name))
        for name in ("model_digest", "adapter_digest", "profile_digest"):
            digest(name, getattr(self, name))
        if not 16 <= len(self.model_digest) <= 64:
            raise _bad(
                f"model_digest must be 16 to 64 bytes, is {len(self.model_digest)}; "
                "use a SHA-256 of the weights or of their names and revisions"
            )
        if self.adapter_digest and not 16 <= len(self.adapter_digest) <= 64:
            raise _bad(f"adapter_digest must be empty or 16 to 64 bytes, is {len(self.adapter_digest)}")
        if len(self.profile_digest) not in (0, 32):
            raise _bad(f"profile_digest must be empty or 32 bytes, is {len(self.profile_digest)}")

    @property
    def digest(self) -> bytes:
        """32 bytes that name the namespace: SHA-256 of all fields, as docs/prefix-hash.md specifies. What the
        daemon calls it, too, unless the daemon has replaced `domain`."""
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
        if self.profile_digest:
            fields.append(("profile", self.profile_digest))
        encoded = (
            bytes([len(tag)]) + tag.encode() + len(value).to_bytes(4, "big") + value for tag, value in fields
        )
        return hashlib.sha256(b"".join(encoded)).digest()

    def to_wire(self) -> types_pb2.NamespaceIdentity:
        """Return the message that registers this identity."""
        geometry = self.geometry
        return types_pb2.NamespaceIdentity(
            model_digest=self.model_digest,
            adapter_digest=self.adapter_digest,
            shard=self.shard,
            domain=self.domain,
            profile_digest=self.profile_digest,
            geometry=types_pb2.Geometry(
                num_layers=geometry.num_layers,
                num_kv_heads=geometry.num_kv_heads,
                head_dim=geometry.head_dim,
                block_tokens=geometry.block_tokens,
                dtype=geometry.dtype,
                layout=geometry.layout,
                layers_per_group=geometry.layers_per_group,
                num_planes=geometry.num_planes,
            ),
        )


class Namespace:
    """A registered namespace. Belongs to the client that registered it, which renews `id` when the
    daemon was restarted; everything else never changes."""

    __slots__ = ("block_bytes", "digest", "fragment_bytes", "fragment_offsets", "id", "identity", "prefill")

    def __init__(
        self,
        identity: NamespaceIdentity,
        namespace_id: int,
        digest: bytes,
        prefill: PrefillSpeed | None = None,
    ) -> None:
        self.identity = identity
        self.prefill = prefill  # as it was stated, to be stated again after a restart
        self.id = namespace_id
        self.digest = digest
        self.fragment_bytes = identity.geometry.fragment_bytes
        self.fragment_offsets = tuple(accumulate(self.fragment_bytes, initial=0))[:-1]  # in the block
        self.block_bytes = identity.geometry.block_bytes

    @property
    def geometry(self) -> Geometry:
        """Shape of its blocks."""
        return self.identity.geometry

    @property
    def num_groups(self) -> int:
        """Fragments in one block."""
        return len(self.fragment_bytes)

    def __repr__(self) -> str:
        return f"<Namespace {self.id} {self.digest.hex()[:12]} {self.block_bytes} bytes a block>"


def _bad(message: str) -> InvalidRequest:
    return InvalidRequest(message, reason="BAD_NAMESPACE")
