"""LMCache's chunks in kvtier: names, namespaces, and the three calls both plug-ins make. No lmcache here.

A chunk is a byte string of a size that its kind fixes; its block is opaque. Its name is a SHA-256 of the
key that LMCache gave it: model name, rank, and the hash of all tokens up to its end. LMCache's keys say
nothing about weights, so the namespace does, where their digest is known: two checkpoints of one name must
not share bytes.

One call's chunks are put as one chain: LMCache hands them over in the order of the prompt, so the daemon
evicts later ones first, which is what a prefix cache wants. Where a chain begins in the middle of a prompt
(LMCache does not say what came before) it is a chain of its own.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...v1.types import NamespaceIdentity, Tier
from ..connector.opaque import opaque_geometry
from ..connector.searching import lookup_after_search
from ..sync import Client
from ..values.namespace import Namespace

_TAG = b"kvtier.lmcache.1"


@dataclass(frozen=True, slots=True)
class ChunkKind:
    """Chunks that could be confused with no others: everything that a namespace must cover."""

    model: str
    chunk_bytes: int
    chunk_tokens: int
    layout: str  # shapes, dtypes and memory format, as LMCache spells them
    weights_digest: bytes = b""

    def identity(self) -> NamespaceIdentity:
        """Return the identity of its namespace. Raises InvalidRequest for sizes that cannot be stored."""
        parts = [_TAG, self.model.encode(), self.weights_digest]
        digest = hashlib.sha256(b"".join(len(part).to_bytes(8, "big") + part for part in parts)).digest()
        layout = hashlib.sha256(self.layout.encode()).hexdigest()[:32]  # shapes of many layers are long
        return NamespaceIdentity(
            digest, opaque_geometry(self.chunk_bytes, self.chunk_tokens, f"lmcache:{layout}")
        )


def chunk_name(key: str) -> bytes:
    """Return the 32-byte name of the chunk with LMCache's key `key`."""
    return hashlib.sha256(_TAG + key.encode()).digest()


class ChunkStore:
    """Chunks through one client; one thread at a time. Raises what the client raises."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._namespaces: dict[ChunkKind, Namespace] = {}

    def stored(self, kind: ChunkKind, names: Sequence[bytes]) -> int:
        """Return how many of the first `names` are stored, without a gap."""
        return self._client.lookup(self._namespace(kind), names).num_blocks

    def available(self, kind: ChunkKind, names: Sequence[bytes]) -> int:
        """Return how many of the first `names` a read would bring, from here or from an object store.

        Waits a quarter of a second at most. `names` begin where they began when they were stored."""
        return lookup_after_search(self._client, self._namespace(kind), names).num_available

    def which(self, kind: ChunkKind, names: Sequence[bytes], max_gaps: int) -> list[bool]:
        """Return which of `names` a read would bring; behind `max_gaps` gaps, none."""
        found = [True] * self.available(kind, names) + [False]
        while len(found) < len(names) and max_gaps > 0:
            num_stored = self.stored(kind, names[len(found) :])
            found += [True] * num_stored + [False]
            max_gaps -= 1
        return (found + [False] * len(names))[: len(names)]

    def read(self, kind: ChunkKind, names: Sequence[bytes], buffers: Sequence[Any]) -> int:
        """Fill `buffers`, each of `chunk_bytes`; return how many of the first are filled.

        What lies in the others is undefined.
        """
        return self._client.get(self._namespace(kind), names, list(buffers)).num_blocks

    def write(self, kind: ChunkKind, names: Sequence[bytes], buffers: Sequence[Any]) -> list[bool]:
        """Store chunks; return which are stored or about to be."""
        report = self._client.put(self._namespace(kind), names, list(buffers))
        return [outcome.is_kept for outcome in report.outcomes]

    def promote(self, kind: ChunkKind, names: Sequence[bytes]) -> None:
        """Have the daemon bring chunks into memory; returns at once, without a call where they are there."""
        namespace = self._namespace(kind)
        if max(self._client.lookup(namespace, names).tiers, default=Tier.DRAM) > Tier.DRAM:
            self._client.prefetch(namespace, names)

    def close(self) -> None:
        """Leave the daemon."""
        self._client.close()

    def _namespace(self, kind: ChunkKind) -> Namespace:
        if kind not in self._namespaces:
            self._namespaces[kind] = self._client.register(kind.identity())
        return self._namespaces[kind]
