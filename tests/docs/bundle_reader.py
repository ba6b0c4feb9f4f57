"""A reader of bundles in plain Python, written from docs/bundle-format.md and nothing else."""

import hmac
import json
import struct
from typing import NamedTuple

import xxhash


class Payload(NamedTuple):
    """One fragment of a bundle."""

    name: bytes
    group: int
    codec: int
    flags: int
    stored: bytes  # decrypted, if it was encrypted
    raw_checksum: bytes
    raw_length: int


class Bundle(NamedTuple):
    """What the head of a bundle says, and its fragments."""

    is_hidden: bool  # names are as `hide` returns them
    namespace: bytes
    parent: bytes | None
    position: int
    names: list[bytes]
    payloads: list[Payload]


def read(data: bytes, data_key: bytes = b"") -> Bundle:
    """Return the bundle in `data`. Raises AssertionError."""
    magic, version, incompat, flags, b, g, position, key, length = struct.unpack_from("<8sHHIIIIIQ", data)
    assert (magic, version, incompat >> 2) == (b"kvtbundl", 1, 0)
    assert incompat != 2
    assert 0 < b * g <= 4096
    assert length == len(data)
    namespace, parent, profile = (data[at : at + 32] for at in (40, 72, 104))
    names = [data[136 + 32 * n : 168 + 32 * n] for n in range(b)]
    entries = 136 + 32 * b
    envelopes = entries + 48 * b * g
    end = envelopes + (64 * b * g if incompat & 1 else 0)
    assert xxhash.xxh3_128(data[:end]).digest() == data[end : end + 16]
    at = end + 16
    payloads = []
    for index in range(b * g):
        group, block = divmod(index, b)
        raw_hash, stored_hash, raw, stored, codec, bits, _ = struct.unpack_from(
            "<16s16sIIHHI", data, entries + 48 * index
        )
        start = (at + 63) // 64 * 64
        assert not any(data[at:start])
        at = start + stored
        payload = data[start:at]
        assert xxhash.xxh3_128(payload).digest() == stored_hash
        if incompat & 1:
            before = names[block - 1] if block else (parent if flags & 1 else None)
            identity = struct.pack(
                "<32s32s32sQQIIHH32s",
                *(namespace, names[block], before or bytes(32), raw, stored),
                *(position + block, group, codec, before is not None),
                profile if codec == 5 else bytes(32),
            )
            envelope = data[envelopes + 64 * index : envelopes + 64 * index + 64]
            payload, raw_hash = decrypt(data_key, key.to_bytes(4, "big") + identity, envelope, payload)
        payloads.append(Payload(names[block], group, codec, bits, payload, raw_hash, raw))
    assert at == len(data)
    return Bundle(incompat > 1, namespace, parent if flags & 1 else None, position, names, payloads)


def hide(data_key: bytes, what: str, *parts: bytes) -> bytes:
    """Return what stands for a `namespace`, a `block` or a `parent`."""
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    key = HKDF(SHA256(), 32, bytes(32), b"kvtier name key 1").derive(data_key)
    return hmac.digest(key, b"kvtier " + what.encode() + b"".join(parts), "sha256")


def unwrap(master_key: bytes, name: str, data: bytes) -> bytes:
    """Return the data key that an object called `name` holds. Raises InvalidTag."""
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    wrap = json.loads(data)
    bound = b"kvtier fleet key" + wrap["id"].to_bytes(4, "big") + name.encode()
    wrapped = bytes.fromhex(wrap["wrapped"])
    return AESGCM(master_key).decrypt(wrapped[:12], wrapped[12:], bound)


def decrypt(data_key: bytes, bound: bytes, envelope: bytes, payload: bytes) -> tuple[bytes, bytes]:
    """Return a payload and the hash of the raw payload. Raises InvalidTag."""
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    salt, counter, hidden, tag = struct.unpack("<16sQ16s16s8x", envelope)
    key = HKDF(SHA256(), 32, salt, b"kvtier record key 1").derive(data_key)
    plain = AESGCM(key).decrypt(counter.to_bytes(12, "big"), payload + hidden + tag, bound)
    return plain[:-16], plain[-16:]
