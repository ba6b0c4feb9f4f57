"""Namespace: what registering an identity returns."""

from itertools import accumulate

from ...v1.types import Geometry, NamespaceIdentity
from .types import PrefillSpeed


class Namespace:
    """A registered namespace.

    Belongs to the client that registered it, which renews `id` when the daemon was restarted; everything else
    never changes.
    """

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
