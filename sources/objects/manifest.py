"""Manifests: the names of the bundles that one host stored since its last one (docs/bundle-format.md).

    | magic, version, counts, host | tenant and namespace, 48 bytes each | rows, 40 bytes each | xxh3-128 |

Hosts read each other's instead of listing bundles. Keys begin with the time, so that one listing from a time
on finds what all hosts wrote since. A manifest is a hint: nothing is lost with one, and a wrong one costs a
request.
"""

import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import xxhash

from ...tiers.block import HASH_BYTES
from .layout import BundleError

MAGIC: Final = b"kvtmanif"
VERSION: Final = 1
MAX_NAMESPACES: Final = 1024
MAX_ROWS: Final = 65_536
HOST_BYTES: Final = 8
_HEAD = struct.Struct("<8sHHII8s4x")  # magic, version, incompat, namespaces, rows, host
_NAMESPACE_BYTES: Final = 16 + HASH_BYTES
_ROW = np.dtype([("namespace", "<u4"), ("num_bytes", "<u4"), ("name", "V32")])
_HASH_BYTES: Final = 16

assert _HEAD.size == 32
assert _ROW.itemsize == 40


class StoredBundle(NamedTuple):
    """One bundle that a host stored. `tenant` as in its key, 32 hex digits."""

    tenant: str
    namespace_digest: bytes
    name: bytes
    num_bytes: int


def pack_manifest(host: bytes, bundles: Sequence[StoredBundle]) -> bytes:
    """Return the manifest of `host`, HOST_BYTES. Raises BundleError beyond MAX_ROWS or MAX_NAMESPACES:
    the caller writes several."""
    numbers: dict[tuple[str, bytes], int] = {}
    rows = np.zeros(len(bundles), _ROW)
    for row, one in zip(rows, bundles, strict=True):
        number = numbers.setdefault((one.tenant, one.namespace_digest), len(numbers))
        row["namespace"], row["num_bytes"], row["name"] = number, one.num_bytes, one.name
    _check_counts(len(numbers), len(bundles))
    head = _HEAD.pack(MAGIC, VERSION, 0, len(numbers), len(bundles), host)
    namespaces = b"".join(bytes.fromhex(tenant) + digest for tenant, digest in numbers)
    packed = head + namespaces + rows.tobytes()
    return packed + xxhash.xxh3_128_digest(packed)


def unpack_manifest(data: bytes) -> tuple[bytes, list[StoredBundle]]:
    """Return the host and the bundles of a manifest. Raises BundleError."""
    if len(data) < _HEAD.size + _HASH_BYTES:
        raise BundleError(f"{len(data)} bytes cannot hold a manifest")
    magic, version, incompat, num_namespaces, num_rows, host = _HEAD.unpack_from(data)
    if magic != MAGIC:
        raise BundleError("it is no manifest: it does not begin with 'kvtmanif'")
    if version != VERSION or incompat:
        raise BundleError(
            f"manifest version {version}, incompatible features {incompat:#x}; a newer kvtier reads it"
        )
    _check_counts(num_namespaces, num_rows)
    at = _HEAD.size + num_namespaces * _NAMESPACE_BYTES
    if len(data) != at + num_rows * _ROW.itemsize + _HASH_BYTES:
        raise BundleError(f"{len(data)} bytes are not what {num_rows} rows take")
    if xxhash.xxh3_128_digest(data[:-_HASH_BYTES]) != data[-_HASH_BYTES:]:
        raise BundleError("the manifest is damaged: the hash does not match")
    rows = np.frombuffer(data, _ROW, num_rows, at)
    if (rows["namespace"] >= num_namespaces).any():
        raise BundleError("a row points outside the table of namespaces")
    namespaces = [
        (data[start : start + 16].hex(), data[start + 16 : start + _NAMESPACE_BYTES])
        for start in range(_HEAD.size, at, _NAMESPACE_BYTES)
    ]
    return host, [
        StoredBundle(namespaces[number][0], namespaces[number][1], name.tobytes(), int(num_bytes))
        for number, num_bytes, name in zip(rows["namespace"], rows["num_bytes"], rows["name"], strict=True)
    ]


def _check_counts(num_namespaces: int, num_rows: int) -> None:
    if num_namespaces > MAX_NAMESPACES or num_rows > MAX_ROWS:
        raise BundleError(
            f"{num_rows} rows of {num_namespaces} namespaces; at most {MAX_ROWS} and {MAX_NAMESPACES}"
        )
