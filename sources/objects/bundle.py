"""Writes bundles, and reads fragments out of them. Pure functions over buffers: no I/O, no clock.

    export: fragments as stored, or raw -> encode_fragment -> encrypt_fragments -> write_bundle -> one PUT
    fetch:  range -> unpack_head -> require -> read_fragment for each fragment as its bytes arrive

A fragment goes up as the cold store has it, or encoded here by an exact codec or the namespace's profile. It
has two hashes, as a record has: one of the payload as it stands, which proves what arrived without decoding
it, and one of the raw payload, taken at put, which proves what a get returns.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ...tiers.base import Buffer, Cause, CopyError, Encryption
from ...tiers.block import tenant_of
from ...tiers.codecs.base import PROFILED_ID, Codec, CodecError, CodecMissing, DoesNotFit, Shape
from ...tiers.cold.record import RecordHeader
from ...tiers.cold.record_io import Opener
from ...tiers.encryption.envelope import Envelopes
from ...tiers.payload import checksum, copy, copy_and_checksum
from .layout import ENTRY, IS_SPENT, BundleChain, BundleError, BundleHead, make_head, pack_head


class StoredFragment(NamedTuple):
    """One fragment to be written: its payload as it is to stand in the bundle."""

    stored: Buffer
    raw_length: int
    checksum: bytes  # xxh3-128 of the raw payload; empty when it is encrypted
    codec_id: int = 0
    is_spent: bool = False  # decoded from a lossy record before it was written
    encryption: Encryption | None = None


def encode_fragment(raw: Buffer, raw_checksum: bytes, codec: Codec, shape: Shape) -> StoredFragment:
    """Return a raw fragment encoded by `codec`, or as it is where that is not shorter. Releases the GIL."""
    plain = StoredFragment(raw, len(raw), raw_checksum)
    if not codec.codec_id or not codec.accepts(shape):
        return plain
    into = np.empty(min(codec.stored_bound(shape), len(raw)), np.uint8)
    try:
        length = codec.encode(shape, raw, into.data)
    except DoesNotFit:
        return plain
    return plain._replace(stored=into.data[:length], codec_id=codec.codec_id)


def encrypt_fragments(
    chain: BundleChain, fragments: Sequence[StoredFragment], envelopes: Envelopes, domain: str
) -> list[StoredFragment]:
    """Return the fragments of a bundle encrypted for the tenant of `domain`, in memory of their own.
    Group-major, as `write_bundle` takes them. Raises CopyError: NO_KEY."""
    sealed = []
    for index, fragment in enumerate(fragments):
        group, block = divmod(index, len(chain.names))
        identity = _record(chain, group, block, fragment, len(fragment.stored)).identity()
        into = np.empty(len(fragment.stored), np.uint8).data
        key, envelope = envelopes.seal(tenant_of(domain), identity, fragment.checksum, fragment.stored, into)
        encryption = Encryption(key, envelope.pack())
        sealed.append(fragment._replace(stored=into, checksum=b"", encryption=encryption))
    return sealed


def write_bundle(
    chain: BundleChain,
    num_groups: int,
    fragments: Sequence[StoredFragment],
    into: npt.NDArray[np.uint8] | None = None,
) -> npt.NDArray[np.uint8]:
    """Return the bytes of a bundle: (total_bytes,) uint8, at the start of `into`, or in new memory.
    New memory is made where `into`, which may hold anything, is shorter.

    `fragments` are group-major: all blocks of the first layer group, then all of the next. What is hashed
    is the copy, so a payload may change meanwhile without a bundle that contradicts itself. Raises
    BundleError beyond the limits of the format, and CopyError(WRONG_CHECKSUM) when a raw payload is not
    what its checksum says.
    """
    keys = {fragment.encryption.key if fragment.encryption else 0 for fragment in fragments}
    if len(keys) != 1:
        raise BundleError(f"fragments under {len(keys)} keys; a bundle has one key, or none")
    entries = np.zeros(len(fragments), ENTRY)
    for name, values in _columns(fragments).items():
        entries[name] = values
    envelopes = [fragment.encryption.envelope for fragment in fragments if fragment.encryption]
    head = make_head(chain, num_groups, entries, envelopes, keys.pop())
    if into is None or len(into) < head.total_bytes:
        into = np.empty(head.total_bytes, np.uint8)
    bundle = into[: head.total_bytes]
    end = 0
    for index, fragment in enumerate(fragments):
        start = int(head.starts[index])
        if end:
            bundle[end:start] = 0
        end = start + len(fragment.stored)
        taken = copy_and_checksum(bundle.data[start:end], fragment.stored)
        if not (fragment.codec_id or head.key) and taken != fragment.checksum:
            raise CopyError(Cause.WRONG_CHECKSUM, "a raw payload is not what its checksum says")
        entries["stored_checksum"][index] = taken
    packed = np.frombuffer(pack_head(head), np.uint8)
    bundle[: len(packed)] = packed
    bundle[len(packed) : int(head.starts[0])] = 0
    return bundle


def read_fragment(
    head: BundleHead, group: int, block: int, stored: Buffer, into: Buffer, opener: Opener
) -> bytes:
    """Fill `into` (raw_length long) from the payload of a fragment; return its xxh3-128.

    `stored` is what lies in `head.span(group, block)`; an encrypted one is decrypted in place. It may be
    `into` itself where there is no codec. Raises CopyError: `into` is then undefined. Releases the GIL.
    """
    entry = head.entries[head.index(group, block)]
    raw_checksum: bytes = entry["checksum"].tobytes()
    if len(stored) != entry["stored_length"] or len(into) != entry["raw_length"]:
        raise CopyError(Cause.SHORT_TRANSFER, f"{len(stored)} bytes, {entry['stored_length']} announced")
    if not entry["codec"] and not head.key:  # one pass: the copy is what is hashed
        if (checksum(into) if stored is into else copy_and_checksum(into, stored)) != raw_checksum:
            raise CopyError(Cause.WRONG_CHECKSUM)
        return raw_checksum
    label = head.label(group, block)
    if head.key:  # the tag proves more than a hash of what is stored
        header = header_of(head, group, block)
        raw_checksum = opener.decrypt(header, stored)
    else:
        check_stored(head, group, block, stored)
    if label.codec_id:
        try:
            opener.codecs.decode(label, label.codec_id, _parameters(head.chain, label.codec_id), stored, into)
        except CodecMissing as error:
            raise CopyError(Cause.UNREADABLE, str(error)) from error
        except CodecError as error:
            raise CopyError(Cause.WRONG_CHECKSUM, str(error)) from error
    elif stored is not into:
        copy(into, stored)
    if checksum(into) != raw_checksum:
        raise CopyError(Cause.WRONG_CHECKSUM)
    return raw_checksum


def check_stored(head: BundleHead, group: int, block: int, stored: Buffer) -> None:
    """Raise CopyError unless `stored` is the payload of a fragment as it was written.
    Needs no codec and no key."""
    entry = head.entries[head.index(group, block)]
    if len(stored) != entry["stored_length"]:
        raise CopyError(Cause.SHORT_TRANSFER, f"{len(stored)} bytes, {entry['stored_length']} announced")
    if checksum(stored) != entry["stored_checksum"].tobytes():
        raise CopyError(Cause.WRONG_CHECKSUM)


def header_of(head: BundleHead, group: int, block: int) -> RecordHeader:
    """Return what a record of this fragment would have as its header, without a place."""
    index = head.index(group, block)
    entry = head.entries[index]
    fragment = StoredFragment(
        memoryview(b""), int(entry["raw_length"]), b"", int(entry["codec"]), bool(entry["flags"] & IS_SPENT)
    )
    record = _record(head.chain, group, block, fragment, int(entry["stored_length"]))
    return record._replace(key=head.key, envelope=head.envelope(index))


def _record(
    chain: BundleChain, group: int, block: int, fragment: StoredFragment, stored_length: int
) -> RecordHeader:
    """Return the header of a record with this fragment. Encryption binds a payload to its identity."""
    return RecordHeader(
        segment=0,
        epoch=0,
        owner_epoch=0,
        namespace_digest=chain.namespace_digest,
        prefix_hash=chain.names[block],
        parent_hash=chain.names[block - 1] if block else chain.parent_hash,
        checksum=fragment.checksum,
        sequence=0,
        raw_length=fragment.raw_length,
        stored_length=stored_length,
        page=0,
        position=chain.position + block,
        group=group,
        namespace_index=0,
        codec=fragment.codec_id,
        codec_parameters=_parameters(chain, fragment.codec_id),
        is_spent=fragment.is_spent,
    )


def _parameters(chain: BundleChain, codec_id: int) -> bytes:
    return chain.profile_digest if codec_id == PROFILED_ID else b""


def _columns(fragments: Sequence[StoredFragment]) -> dict[str, list[object]]:
    return {
        "checksum": [one.checksum for one in fragments],
        "raw_length": [one.raw_length for one in fragments],
        "stored_length": [len(one.stored) for one in fragments],
        "codec": [one.codec_id for one in fragments],
        "flags": [IS_SPENT if one.is_spent else 0 for one in fragments],
    }
