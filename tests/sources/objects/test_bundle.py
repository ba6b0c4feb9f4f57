"""Bundles: what was written comes back bit by bit; damaged or hostile bytes are an error."""

import random
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.sources.objects.bundle import (
    StoredFragment,
    encode_fragment,
    encrypt_fragments,
    read_fragment,
    write_bundle,
)
from kvtier.sources.objects.layout import (
    FIXED_BYTES,
    MAX_HEAD_BYTES,
    BundleError,
    BundleHead,
    measure_head,
    pack_head,
    unpack_head,
)
from kvtier.tiers.base import Cause, CopyError
from kvtier.tiers.block import Geometry, NamespaceIdentity
from kvtier.tiers.codecs.base import shape_of
from kvtier.tiers.codecs.registry import codec_named
from kvtier.tiers.encryption.envelope import Envelopes
from kvtier.tiers.encryption.keyring import Keyring
from kvtier.tiers.encryption.master_keys import MasterKeys
from kvtier.v1.bundles import MAX_FRAGMENTS, TARGET_BYTES, blocks_per_bundle
from tests.sources.objects.bundles import (
    GEOMETRY,
    RED,
    Made,
    chain_of,
    make_bundle,
    opener_for,
    verify_bundle,
)

CODECS = ["identity", "planes", "exponents", "lz4", "zstd"]


def read_all(bundle: np.ndarray, made: Made, envelopes: Envelopes | None = None) -> list[bytes]:
    """Read a bundle as a fetch does: head, identity, then every fragment."""
    head = unpack_head(bundle.data)
    head.require(made.chain, made.identity.geometry)
    opener = opener_for(made.identity, envelopes)
    found = []
    for index, length in enumerate(head.entries["raw_length"]):
        group, block = divmod(index, head.num_blocks)
        start, end = head.span(group, block)
        into = bytearray(int(length))
        stored = memoryview(bytearray(bundle[start:end]))  # decrypted in place: not in the bundle of the test
        assert read_fragment(head, group, block, stored, memoryview(into), opener) == (
            xxhash.xxh3_128_digest(into)
        )
        found.append(bytes(into))
    return found


def outcome(bundle: np.ndarray, made: Made) -> list[bytes] | None:
    """Return what is read; None for a clear error."""
    try:
        return read_all(bundle, made)
    except (BundleError, CopyError):
        return None


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(("num_blocks", "first"), [(1, 0), (3, 0), (4, 4)])
def test_what_was_written_comes_back(codec: str, num_blocks: int, first: int) -> None:
    made = make_bundle(num_blocks, codec=codec, first=first)
    assert read_all(made.bundle, made) == made.payloads
    head = verify_bundle(made.bundle.data)
    assert bytes(made.bundle[: len(pack_head(head))]) == pack_head(head)


@pytest.mark.parametrize(("excess", "is_reused"), [(0, True), (4096, True), (-1, False)])
def test_used_memory_gives_the_same_bundle(excess: int, is_reused: bool) -> None:
    made = make_bundle(3)
    used = np.full(len(made.bundle) + excess, 0xA5, np.uint8)
    fragments = [
        StoredFragment(memoryview(one), len(one), xxhash.xxh3_128_digest(one)) for one in made.payloads
    ]
    bundle = write_bundle(made.chain, GEOMETRY.num_groups, fragments, used)
    assert bundle.tobytes() == made.bundle.tobytes()
    assert np.shares_memory(bundle, used) == is_reused


def test_the_first_layers_are_one_range_before_all_others() -> None:
    made = make_bundle(4)
    head = unpack_head(made.bundle.data)
    spans = [head.span(group, block) for group in range(3) for block in range(4)]
    assert spans == sorted(spans)
    start, end = head.span_of_groups(0, 1)
    assert (start, end) == (spans[0][0], spans[3][1])
    assert all(span[0] % 64 == 0 for span in spans)
    opener = opener_for()
    for block in range(4):  # nothing behind the range is needed
        part = made.bundle[start:end][spans[block][0] - start : spans[block][1] - start]
        into = bytearray(len(part))
        read_fragment(head, 0, block, part.data, memoryview(into), opener)
        assert bytes(into) == made.payloads[block]


def test_every_flipped_byte_is_an_error_or_changes_nothing() -> None:
    made = make_bundle(2, codec="planes")
    for at in range(len(made.bundle)):
        damaged = made.bundle.copy()
        damaged[at] ^= 1 << (at % 8)
        with pytest.raises((BundleError, CopyError)):
            verify_bundle(damaged.data)
        assert outcome(damaged, made) in (None, made.payloads)


def test_every_truncation_is_an_error() -> None:
    made = make_bundle(1)
    for length in range(len(made.bundle)):
        with pytest.raises((BundleError, CopyError)):
            verify_bundle(made.bundle[:length].data)
        assert outcome(made.bundle[:length], made) is None
    with pytest.raises(BundleError, match="announced"):
        verify_bundle(np.append(made.bundle, np.uint8(0)).data)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=600), st.integers(0, 2**32))
def test_hostile_bytes_with_a_valid_hash_are_an_error_or_a_bundle_that_checks(data: bytes, seed: int) -> None:
    """An attacker can hash: lengths must be bounded without it."""
    made = make_bundle(2, codec="planes")
    length = measure_head(made.bundle.data)
    chosen = random.Random(seed)
    head = bytearray(made.bundle[:length])
    for byte in data[: chosen.randrange(1, 40)]:
        at = chosen.randrange(8, length - 16)
        head[at] = byte
    head[-16:] = xxhash.xxh3_128_digest(bytes(head[:-16]))
    damaged = made.bundle.copy()
    damaged[:length] = np.frombuffer(head, np.uint8)
    assert outcome(damaged, made) in (None, made.payloads)
    assert outcome(np.frombuffer(data, np.uint8), made) is None


@pytest.mark.parametrize("num_blocks", [0, 1, MAX_FRAGMENTS, 2**31, 2**32 - 1])
@pytest.mark.parametrize("num_groups", [0, 1, 2, 2**32 - 1])
def test_a_head_says_how_much_to_read_within_limits(num_blocks: int, num_groups: int) -> None:
    start = memoryview(bytearray(make_bundle(1).bundle[:FIXED_BYTES]))
    start[16:20] = num_blocks.to_bytes(4, "little")
    start[20:24] = num_groups.to_bytes(4, "little")
    if 0 < num_blocks * num_groups <= MAX_FRAGMENTS:
        assert FIXED_BYTES < measure_head(start) <= MAX_HEAD_BYTES
    else:
        with pytest.raises(BundleError, match="at most 4096 fragments"):
            measure_head(start)


@pytest.mark.parametrize(
    ("at", "value", "words"),
    [(0, b"kvtxxxxx", "no bundle"), (8, b"\2\0", "version 2"), (10, b"\4\0", "features 0x4")],
)
def test_another_format_is_refused_with_words(at: int, value: bytes, words: str) -> None:
    bundle = make_bundle(1).bundle.copy()
    bundle[at : at + len(value)] = np.frombuffer(value, np.uint8)
    with pytest.raises(BundleError, match=words):
        unpack_head(bundle.data)


def test_a_bundle_under_another_name_is_refused() -> None:
    made, other = make_bundle(2), make_bundle(2, seed=9)
    stranger = NamespaceIdentity(b"s" * 32, GEOMETRY, domain="tenant:red")
    for chain in (
        other.chain,
        chain_of(stranger, 2),
        chain_of(RED, 3),
        chain_of(RED, 2)._replace(position=2),
        chain_of(RED, 2)._replace(parent_hash=bytes(32)),
        chain_of(RED, 2)._replace(profile_digest=b"p" * 32),
    ):
        with pytest.raises(BundleError, match="another bundle"):
            unpack_head(made.bundle.data).require(chain, GEOMETRY)
    wider = Geometry(5, 2, 32, 8, "bfloat16", layers_per_group=2)
    with pytest.raises(BundleError, match="lengths of its namespace"):
        unpack_head(made.bundle.data).require(made.chain, wider)


def test_a_payload_that_changed_under_way_is_not_written() -> None:
    fragment = StoredFragment(memoryview(b"changed" * 8), 56, xxhash.xxh3_128_digest(b"before"))
    with pytest.raises(CopyError, match="checksum"):
        write_bundle(chain_of(RED, 1), 1, [fragment])


def test_a_spent_fragment_stays_spent() -> None:
    payload = bytes(range(64))
    fragment = StoredFragment(memoryview(payload), 64, xxhash.xxh3_128_digest(payload), is_spent=True)
    head = unpack_head(write_bundle(chain_of(RED, 1), 1, [fragment]).data)
    assert head.label(0, 0).is_spent


def test_a_lossy_fragment_needs_a_namespace_with_a_profile() -> None:
    fragment = StoredFragment(memoryview(bytes(32)), 64, bytes(16), codec_id=5)
    with pytest.raises(BundleError, match="no profile"):
        write_bundle(chain_of(RED, 1), 1, [fragment])
    head = unpack_head(write_bundle(chain_of(RED, 1)._replace(profile_digest=b"p" * 32), 1, [fragment]).data)
    assert head.chain.profile_digest == b"p" * 32
    with pytest.raises(CopyError, match="profile") as missing:
        read_fragment(head, 0, 0, memoryview(bytes(32)), memoryview(bytearray(64)), opener_for())
    assert missing.value.cause is Cause.UNREADABLE


@pytest.mark.parametrize(
    ("geometry", "num_blocks"),
    [
        (Geometry(32, 8, 128, 16, "bfloat16"), 16),  # 32 MiB
        (Geometry(80, 8, 128, 16, "bfloat16"), 8),  # 80 MiB, halved
        (Geometry(1, 1, 16, 512, "bfloat16"), 1),  # one block has more tokens
        (Geometry(80, 64, 128, 256, "bfloat16"), 1),  # one block has more bytes
        (Geometry(80, 1, 16, 1, "bfloat16", layers_per_group=1), 32),  # many fragments
    ],
)
def test_the_blocks_of_a_bundle_follow_from_the_namespace(geometry: Geometry, num_blocks: int) -> None:
    assert blocks_per_bundle(geometry) == num_blocks
    assert num_blocks * geometry.num_groups <= MAX_FRAGMENTS
    assert num_blocks == 1 or num_blocks * geometry.block_bytes <= TARGET_BYTES


# ------------------------------------------------------------------------------------- encryption


@pytest.fixture
def envelopes(tmp_path: Path) -> Envelopes:
    return Envelopes(Keyring(tmp_path, MasterKeys(bytes(range(32)))))


@pytest.mark.parametrize("codec", ["identity", "planes"])
def test_encrypted_bundles_come_back_with_their_key_only(codec: str, envelopes: Envelopes) -> None:
    made = make_bundle(2, codec=codec, envelopes=envelopes)
    assert read_all(made.bundle, made, envelopes) == made.payloads
    verify_bundle(made.bundle.data)  # without a key
    everything = made.bundle.tobytes()
    assert all(payload[:64] not in everything for payload in made.payloads)
    assert all(xxhash.xxh3_128_digest(payload) not in everything for payload in made.payloads)
    with pytest.raises(CopyError) as without:
        read_all(made.bundle, made)
    assert without.value.cause is Cause.NO_KEY
    assert isinstance(envelopes.keyring, Keyring)
    envelopes.keyring.erase("tenant:red", 1)
    envelopes.forget("tenant:red")
    with pytest.raises(CopyError) as erased:
        read_all(made.bundle, made, envelopes)
    assert erased.value.cause is Cause.NO_KEY


def test_an_encrypted_payload_moved_to_another_fragment_is_not_authentic(envelopes: Envelopes) -> None:
    """By a host with the right to write, and no key: hashes match, the tag does not."""
    made = make_bundle(2, envelopes=envelopes)
    head = unpack_head(made.bundle.data)
    (one, end), (other, after) = head.span(0, 0), head.span(0, 1)
    bundle = made.bundle.copy()
    bundle[one:end], bundle[other:after] = made.bundle[other:after], made.bundle[one:end]
    entries = head.entries.copy()
    entries[[0, 1]] = entries[[1, 0]]
    swapped = head.envelope(1) + head.envelope(0) + head.envelopes[128:]
    moved = BundleHead(head.chain, head.num_groups, entries, swapped, head.key, head.starts, head.total_bytes)
    bundle[: measure_head(bundle.data)] = np.frombuffer(pack_head(moved), np.uint8)
    verify_bundle(bundle.data)
    with pytest.raises(CopyError) as refused:
        read_all(bundle, made, envelopes)
    assert refused.value.cause is Cause.NOT_AUTHENTIC


@pytest.mark.parametrize("is_encrypted", [False, True])
@pytest.mark.parametrize("codec", ["planes", "zstd"])
def test_a_payload_that_decodes_to_other_bytes_is_an_error(
    codec: str, is_encrypted: bool, envelopes: Envelopes
) -> None:
    """What is stored has a valid hash or tag; what comes out of the codec is not what was put."""
    chain, length = chain_of(RED, 1), RED.geometry.fragment_bytes[0]
    payload = (np.arange(length) % 7).astype(np.uint8).tobytes()
    digest = xxhash.xxh3_128_digest(bytes(len(payload)))
    lie = encode_fragment(memoryview(payload), digest, codec_named(codec), shape_of(RED.geometry, 0))
    assert lie.codec_id
    fragments = [lie] * RED.geometry.num_groups
    if is_encrypted:
        fragments = list(encrypt_fragments(chain, fragments, envelopes, RED.domain))
    bundle = write_bundle(chain, len(fragments), fragments)
    head = unpack_head(bundle.data)
    start, end = head.span(0, 0)
    stored, into = memoryview(bytearray(bundle[start:end])), bytearray(len(payload))
    with pytest.raises(CopyError) as refused:
        read_fragment(head, 0, 0, stored, memoryview(into), opener_for(RED, envelopes))
    assert refused.value.cause is Cause.WRONG_CHECKSUM


def test_a_bundle_has_one_key(envelopes: Envelopes) -> None:
    chain = chain_of(RED, 2)
    payload = bytes(64)
    fragment = StoredFragment(memoryview(payload), 64, xxhash.xxh3_128_digest(payload))
    sealed = encrypt_fragments(chain, [fragment, fragment], envelopes, "tenant:red")
    with pytest.raises(BundleError, match="2 keys"):
        write_bundle(chain, 1, [fragment, sealed[1]])
