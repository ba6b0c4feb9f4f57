"""Keyed names: what stands in the keys and heads of an encrypted tenant's bundles instead of hashes.

A prefix hash is SHA-256 of all tokens up to a block, and a namespace digest one of a model: a reader of the
bucket could try guesses of both. With the tenant's data key both are hashed again, so that names still follow
from the chain, for the hosts that hold the key, and say nothing to others. A block that stands as a parent is
hashed apart: heads do not tell which bundles continue each other, and the same prompt has other names in each
namespace. Without the data key nothing can be found any more, which is a part of erasing.
"""

import hmac

from ...tiers.encryption.keyring import DataKey
from .layout import BundleChain

_KEY_BYTES = 32


class HiddenNames:
    """Hides names under one data key. Immutable."""

    def __init__(self, key: DataKey) -> None:
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        self._key = HKDF(SHA256(), _KEY_BYTES, None, b"kvtier name key 1").derive(key.secret)

    def namespace(self, digest: bytes) -> bytes:
        """Return what stands for a namespace, 32 bytes."""
        return self._hash(b"kvtier namespace", digest)

    def block(self, digest: bytes, prefix_hash: bytes) -> bytes:
        """Return what stands for a block of namespace `digest`, 32 bytes."""
        return self._hash(b"kvtier block", digest, prefix_hash)

    def chain(self, chain: BundleChain) -> BundleChain:
        """Return a chain as it stands in a head."""
        digest, parent = chain.namespace_digest, chain.parent_hash
        return chain._replace(
            namespace_digest=self.namespace(digest),
            parent_hash=self._hash(b"kvtier parent", digest, parent) if parent else b"",
            names=tuple(self.block(digest, name) for name in chain.names),
            is_hidden=True,
        )

    def _hash(self, *parts: bytes) -> bytes:
        return hmac.digest(self._key, b"".join(parts), "sha256")
