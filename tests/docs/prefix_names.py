"""docs/prefix-hash.md in plain Python: written from the page alone, imports nothing of kvtier.

What other people write after reading the page should look like this; test_prefix_hash.py compares it with
the product and with the published vectors.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence

TAG = bytes.fromhex("6b76746965722e7072656669782e31")


def inputs(
    block_tokens: int, tokens: Sequence[int], parent: bytes, extra_keys: Sequence[bytes]
) -> Iterator[bytes]:
    """Yield the bytes that are hashed for each full block."""
    for first in range(0, len(tokens) // block_tokens * block_tokens, block_tokens):
        hashed = TAG + block_tokens.to_bytes(4, "big") + len(parent).to_bytes(1, "big") + parent
        for token in tokens[first : first + block_tokens]:
            hashed += token.to_bytes(8, "little")
        hashed += len(extra_keys).to_bytes(4, "big")
        for key in extra_keys:
            hashed += len(key).to_bytes(4, "big") + key
        yield hashed
        parent = hashlib.sha256(hashed).digest()


def names(
    block_tokens: int, tokens: Sequence[int], parent: bytes = b"", extra_keys: Sequence[bytes] = ()
) -> list[bytes]:
    """Return the prefix hash of each full block."""
    return [hashlib.sha256(one).digest() for one in inputs(block_tokens, tokens, parent, extra_keys)]


DIGESTS = {"model": "model_digest", "adapter": "adapter_digest"}
TEXTS = ("shard", "domain", "dtype", "layout")
NUMBERS = ("num_layers", "num_kv_heads", "head_dim", "block_tokens", "layers_per_group", "num_planes")


def namespace_input(identity: Mapping[str, str | int]) -> bytes:
    """Return the bytes that are hashed for a namespace; digests in `identity` are hexadecimal."""
    fields = [(tag, bytes.fromhex(str(identity[name]))) for tag, name in DIGESTS.items()]
    fields += [(tag, str(identity[tag]).encode()) for tag in TEXTS]
    fields += [(tag, int(identity[tag]).to_bytes(4, "big")) for tag in NUMBERS]
    if identity["profile_digest"]:
        fields.append(("profile", bytes.fromhex(str(identity["profile_digest"]))))
    return b"".join(
        len(tag).to_bytes(1, "big") + tag.encode() + len(value).to_bytes(4, "big") + value
        for tag, value in fields
    )
