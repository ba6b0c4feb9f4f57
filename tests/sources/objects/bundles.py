"""Small bundles with real payloads, and what reads them: shared by the tests of the room."""

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from kvtier.sources.objects.bundle import (
    StoredFragment,
    check_stored,
    encode_fragment,
    encrypt_fragments,
    write_bundle,
)
from kvtier.sources.objects.layout import BundleChain, BundleError, BundleHead, pack_head, unpack_head
from kvtier.tiers.base import Buffer
from kvtier.tiers.block import Geometry, NamespaceIdentity
from kvtier.tiers.codecs.base import shape_of
from kvtier.tiers.codecs.records import RecordCodecs
from kvtier.tiers.codecs.registry import codec_named
from kvtier.tiers.cold.record_io import Opener
from kvtier.tiers.encryption.envelope import Envelopes
from tests.contracts.kv_values import values_like_kv

#: Three layer groups, the last one shorter.
GEOMETRY = Geometry(
    num_layers=5, num_kv_heads=2, head_dim=16, block_tokens=8, dtype="bfloat16", layers_per_group=2
)
RED = NamespaceIdentity(b"r" * 32, GEOMETRY, domain="tenant:red")


class Made(NamedTuple):
    """A bundle, and what went into it: raw payloads, group-major."""

    bundle: npt.NDArray[np.uint8]
    chain: BundleChain
    payloads: list[bytes]
    identity: NamespaceIdentity


def chain_of(identity: NamespaceIdentity, num_blocks: int, *, seed: int = 0, first: int = 0) -> BundleChain:
    """Return blocks `first` and on of a chain that `seed` names."""
    names = [hashlib.sha256(b"%d block %d" % (seed, n)).digest() for n in range(first + num_blocks)]
    parent = names[first - 1] if first else b""
    return BundleChain(identity.digest, parent, first, tuple(names[first:]), identity.profile_digest)


def raw_fragments(identity: NamespaceIdentity, num_blocks: int, seed: int = 0) -> list[bytes]:
    """Return payloads like KV, group-major."""
    geometry = identity.geometry
    return [
        values_like_kv(shape_of(geometry, group), seed=seed * 1000 + group * 100 + block).tobytes()
        for group in range(geometry.num_groups)
        for block in range(num_blocks)
    ]


def make_bundle(
    num_blocks: int = 3,
    *,
    identity: NamespaceIdentity = RED,
    codec: str = "identity",
    envelopes: Envelopes | None = None,
    seed: int = 0,
    first: int = 0,
) -> Made:
    """Return a bundle of `num_blocks` blocks."""
    chain = chain_of(identity, num_blocks, seed=seed, first=first)
    payloads = raw_fragments(identity, num_blocks, seed)
    fragments: Sequence[StoredFragment] = [
        encode_fragment(
            memoryview(payload),
            xxhash.xxh3_128_digest(payload),
            codec_named(codec),
            shape_of(identity.geometry, index // num_blocks),
        )
        for index, payload in enumerate(payloads)
    ]
    if envelopes is not None:
        fragments = encrypt_fragments(chain, fragments, envelopes, identity.domain)
    return Made(write_bundle(chain, identity.geometry.num_groups, fragments), chain, payloads, identity)


def opener_for(identity: NamespaceIdentity = RED, envelopes: Envelopes | None = None) -> Opener:
    """Return what decrypts and decodes fragments of one namespace."""
    namespaces = {identity.digest: identity}
    return Opener(namespaces, RecordCodecs(namespaces), envelopes)


def verify_bundle(bundle: Buffer) -> BundleHead:
    """Return the head of a whole bundle, every byte of it checked. Needs no codec and no key.
    Raises BundleError and CopyError."""
    head = unpack_head(bundle)
    if len(bundle) != head.total_bytes:
        raise BundleError(f"{len(bundle)} bytes, {head.total_bytes} announced")
    end = len(pack_head(head))
    for index in range(len(head.entries)):
        group, block = divmod(index, head.num_blocks)
        start, after = head.span(group, block)
        if any(bundle[end:start]):
            raise BundleError(f"bytes between fragments, at {end}, are not zero")
        check_stored(head, group, block, bundle[start:after])
        end = after
    return head
