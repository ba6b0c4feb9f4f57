"""Reads what a store holds: counts by folder, the head of one bundle, every byte of one bundle.

Needs no daemon, no key and no codec: hashes of payloads as they stand prove them. Memory is bounded by one
layer group of one bundle.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ...tiers.base import CopyError
from .bundle import check_stored
from .keys import BundleKey, parse_bundle_key
from .layout import BundleError, BundleHead, head_bytes, measure_head, unpack_head
from .store import ObjectInfo, ObjectStore

_FIRST_READ_BYTES = 64 << 10  # holds most heads


@dataclass(slots=True)
class FolderCount:
    """Bundles of one namespace of one tenant in one epoch."""

    num_bundles: int = 0
    num_bytes: int = 0


@dataclass(slots=True)
class Inventory:
    """Bundles of a store by (epoch, tenant, namespace), and what is none."""

    folders: dict[tuple[str, str, str], FolderCount] = field(default_factory=dict)
    other: FolderCount = field(default_factory=FolderCount)  # objects with keys that kvtier does not write

    def add(self, found: Iterable[ObjectInfo]) -> None:
        """Count objects."""
        for one in found:
            key = parse_bundle_key(one.key)
            count = self.other if key is None else self.folders.setdefault(key[:3], FolderCount())
            count.num_bundles += 1
            count.num_bytes += one.num_bytes


def read_head(store: ObjectStore, key: str, num_bytes: int) -> BundleHead:
    """Return the head of a bundle that is `num_bytes` long.
    Raises BundleError when it is none, not that long or not of this name; StoreError; FileNotFoundError."""
    start = _read(store, key, 0, min(num_bytes, _FIRST_READ_BYTES))
    length = measure_head(start.data)
    if len(start) < length <= num_bytes:
        start = np.append(start, _read(store, key, len(start), length - len(start)))
    head = unpack_head(start.data)
    if head.total_bytes != num_bytes:
        raise BundleError(f"{num_bytes} bytes long, {head.total_bytes} announced")
    named = parse_bundle_key(key)
    if named is not None and not is_named(head, named):
        raise BundleError("it is another bundle than its key names")
    return head


def is_named(head: BundleHead, key: BundleKey) -> bool:
    """Whether a key names this bundle."""
    return (head.chain.namespace_digest.hex(), head.chain.names[-1].hex()) == (key.namespace, key.name)


def verify_object(store: ObjectStore, key: str, num_bytes: int) -> BundleHead:
    """Return the head of a bundle after every byte of it was read and compared.
    Raises BundleError and CopyError when it is damaged; StoreError; FileNotFoundError."""
    head = read_head(store, key, num_bytes)
    end = head_bytes(head.num_blocks, head.num_groups, is_encrypted=head.key != 0)
    for group in range(head.num_groups):
        start, after = end, head.span_of_groups(group, group + 1)[1]
        part = _read(store, key, start, after - start)
        for block in range(head.num_blocks):
            first, last = head.span(group, block)
            if part[end - start : first - start].any():
                raise BundleError(f"bytes between fragments, at {end}, are not zero")
            try:
                check_stored(head, group, block, part[first - start : last - start].data)
            except CopyError as error:
                raise CopyError(error.cause, f"layer group {group} of block {block}") from error
            end = last
    return head


def _read(store: ObjectStore, key: str, start: int, length: int) -> npt.NDArray[np.uint8]:
    into = np.empty(length, np.uint8)
    if length and not store.read(key, [(start, into.data)]):
        raise FileNotFoundError(key)
    return into
