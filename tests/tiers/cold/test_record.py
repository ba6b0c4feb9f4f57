"""Record headers and footers: what was packed comes back, and nothing else is ever believed."""

import struct
from typing import Any

import google_crc32c
import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.tiers.cold.footer import (
    Footer,
    FooterError,
    footer_bytes_for,
    is_tombstone,
    pack_footer,
    pack_tombstone,
    unpack_footer,
    unpack_head,
)
from kvtier.tiers.cold.record import (
    ENCRYPTED,
    ENTRY,
    ENTRY_BYTES,
    ENTRY_OFFSET,
    HEADER_BYTES,
    PAGE_PROLOGUE,
    RecordError,
    RecordHeader,
    pack_header,
    unpack_header,
)
from kvtier.tiers.encryption.envelope import ENVELOPE_BYTES
from kvtier.v1.shm import PAGE_BYTES

DATA_PAGES = 1000
U32, U64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
LENGTH = st.integers(1, 2**44 - 1)
HASH = st.binary(min_size=32, max_size=32)

headers = st.builds(
    RecordHeader,
    segment=U32,
    epoch=U64,
    owner_epoch=U64,
    namespace_digest=HASH,
    prefix_hash=HASH,
    parent_hash=st.one_of(st.just(b""), HASH),
    checksum=st.binary(min_size=16, max_size=16),
    sequence=U64,
    raw_length=LENGTH,
    stored_length=LENGTH,
    page=U32,
    position=U32,
    group=U32,
    namespace_index=U32,
    codec=st.integers(0, 2**16 - 1),
    codec_parameters=st.binary(max_size=32).map(lambda data: data.rstrip(b"\0")),
    stored_hash=U64,
    is_spent=st.booleans(),
    key=st.just(0),
    envelope=st.just(b""),
)
encrypted_headers = st.builds(
    lambda header, key, envelope: header._replace(key=key, envelope=envelope, checksum=b""),
    headers,
    st.integers(1, 2**32 - 1),
    st.binary(min_size=ENVELOPE_BYTES, max_size=ENVELOPE_BYTES),
)
SAMPLE = RecordHeader(7, 1 << 60, 3, b"n" * 32, b"p" * 32, b"q" * 32, b"c" * 16, 9, 9000, 9000, 40, 2, 1, 0)
ENCRYPTED_SAMPLE = SAMPLE._replace(key=0xCAFE, envelope=bytes(range(ENVELOPE_BYTES)), checksum=b"")


def page_of(header: RecordHeader) -> bytearray:
    page = bytearray(PAGE_BYTES)
    pack_header(memoryview(page), header)
    return page


@given(st.one_of(headers, encrypted_headers))
@settings(max_examples=200, deadline=None)
def test_a_header_comes_back(header: RecordHeader) -> None:
    assert unpack_header(page_of(header)) == header


@given(headers)
@settings(max_examples=100, deadline=None)
def test_the_footer_entry_is_the_middle_of_the_header(header: RecordHeader) -> None:
    page = bytearray(PAGE_BYTES)
    entry = np.frombuffer(pack_header(memoryview(page), header), ENTRY)[0]
    assert entry["prefix_hash"].tobytes() == header.prefix_hash
    assert entry["checksum"].tobytes() == header.checksum
    for name in ("sequence", "raw_length", "stored_length", "page", "position", "group", "codec"):
        assert entry[name] == getattr(header, name)
    quick = np.frombuffer(page, PAGE_PROLOGUE)[0]
    assert (quick["segment"], quick["epoch"], quick["page"]) == (header.segment, header.epoch, header.page)


@pytest.mark.parametrize("header", [SAMPLE, ENCRYPTED_SAMPLE], ids=["plain", "encrypted"])
def test_every_flipped_byte_of_a_header_is_noticed(header: RecordHeader) -> None:
    page = page_of(header)
    for offset in range(HEADER_BYTES + len(header.envelope)):
        for mask in (1, 0x80):
            page[offset] ^= mask
            with pytest.raises(RecordError):
                unpack_header(page)
            page[offset] ^= mask
    assert unpack_header(page) == header


def test_an_encrypted_record_is_refused_by_readers_from_before_there_were_any() -> None:
    """They know no incompat bit: what they compare is `incompat & ~0`."""
    plain, encrypted = page_of(SAMPLE), page_of(ENCRYPTED_SAMPLE)
    assert struct.unpack_from("<I", plain, 16)[0] == 0
    assert struct.unpack_from("<I", encrypted, 16)[0] == ENCRYPTED


@pytest.mark.parametrize("key", [0, 5])
def test_a_key_without_an_envelope_is_refused_and_the_other_way_round(key: int) -> None:
    page = page_of(SAMPLE if key else ENCRYPTED_SAMPLE)
    struct.pack_into("<I", page, ENTRY_OFFSET + ENTRY_BYTES - 4, key)
    fix_crc(page)
    with pytest.raises(RecordError, match="envelope"):
        unpack_header(page)


def test_the_identity_says_what_a_record_is_and_not_where() -> None:
    moved = SAMPLE._replace(segment=1, epoch=2, owner_epoch=9, sequence=77, page=3, namespace_index=4)
    assert moved.identity() == SAMPLE.identity()
    changes: dict[str, Any] = {
        "namespace_digest": b"m" * 32,
        "prefix_hash": b"z" * 32,
        "parent_hash": b"",
        "raw_length": 9001,
        "stored_length": 8999,
        "position": 3,
        "group": 2,
        "codec": 1,
        "codec_parameters": b"p",
    }
    for name, value in changes.items():
        assert SAMPLE._replace(**{name: value}).identity() != SAMPLE.identity(), name


def fix_crc(page: bytearray) -> None:
    """Make the CRC of a header right again, wherever the header says that it ends."""
    length = struct.unpack_from("<H", page, 10)[0]
    if 4 <= length <= len(page):
        struct.pack_into("<I", page, length - 4, google_crc32c.value(bytes(page[: length - 4])))


@given(st.lists(st.tuples(st.integers(0, HEADER_BYTES - 1), st.integers(0, 255)), min_size=1, max_size=8))
@settings(max_examples=400, deadline=None)
def test_a_forged_header_with_a_right_crc_is_consistent_or_refused(
    changes: list[tuple[int, int]],
) -> None:
    page = page_of(SAMPLE)
    for offset, value in changes:
        page[offset] = value
    fix_crc(page)
    try:
        header = unpack_header(page)
    except RecordError:
        return
    assert 0 < header.stored_length < 1 << 44
    assert len(header.parent_hash) in (0, 32)


@given(st.binary(max_size=600))
@settings(max_examples=300, deadline=None)
def test_noise_is_no_header(noise: bytes) -> None:
    with pytest.raises(RecordError):
        unpack_header(noise)


@pytest.mark.parametrize(("offset", "what"), [(8, "version"), (16, "features")])
def test_an_unknown_version_is_refused_even_with_a_right_crc(offset: int, what: str) -> None:
    page = page_of(SAMPLE)
    page[offset] = 2
    fix_crc(page)
    with pytest.raises(RecordError, match=what):
        unpack_header(page)


def test_a_longer_header_of_a_compatible_version_is_read() -> None:
    page = page_of(SAMPLE)
    page[HEADER_BYTES - 4 : HEADER_BYTES + 40] = b"x" * 44
    struct.pack_into("<H", page, 10, HEADER_BYTES + 64)
    struct.pack_into("<I", page, 12, 1)  # a compat feature we do not know
    fix_crc(page)
    assert unpack_header(page) == SAMPLE


# ---------------------------------------------------------------------------------------- footers


def make_footer(num_records: int = 20) -> Footer:
    entries = []
    for i in range(num_records):
        header = SAMPLE._replace(page=4 * i, namespace_index=i % 2, prefix_hash=bytes([i]) * 32)
        entries.append(pack_header(memoryview(bytearray(PAGE_BYTES)), header))
    return Footer(7, 1 << 60, 3, [b"a" * 32, b"b" * 32], np.frombuffer(b"".join(entries), ENTRY))


def parse(data: bytes, segment: int = 7, epoch: int = 1 << 60) -> Footer:
    head = unpack_head(data[:PAGE_BYTES], segment, epoch, DATA_PAGES)
    return unpack_footer(head, data[PAGE_BYTES:], segment, epoch, DATA_PAGES)


def test_a_footer_comes_back() -> None:
    footer = make_footer()
    found = parse(pack_footer(footer))
    assert found[:4] == footer[:4]
    assert found.entries.tobytes() == footer.entries.tobytes()


@pytest.mark.parametrize(("segment", "epoch"), [(8, 1 << 60), (7, (1 << 60) + 1)])
def test_a_footer_of_another_segment_or_life_is_none(segment: int, epoch: int) -> None:
    with pytest.raises(FooterError):
        parse(pack_footer(make_footer()), segment, epoch)


def test_every_flipped_byte_of_a_footer_is_noticed() -> None:
    data = bytearray(pack_footer(make_footer(3)))
    used = [*range(68), *range(PAGE_BYTES, PAGE_BYTES + 64 + 3 * ENTRY_BYTES)]
    for offset in used:
        data[offset] ^= 1
        with pytest.raises(FooterError):
            parse(bytes(data))
        data[offset] ^= 1
    parse(bytes(data))


def rehash(data: bytearray) -> None:
    """Make both checksums of a footer right again, as far as its own counts make sense."""
    namespaces, records = struct.unpack_from("<I", data, 20)[0], struct.unpack_from("<Q", data, 40)[0]
    body = bytes(data[PAGE_BYTES : PAGE_BYTES + namespaces * 32 + records * ENTRY_BYTES])
    data[48:64] = xxhash.xxh3_128_digest(body)
    struct.pack_into("<I", data, 64, google_crc32c.value(bytes(data[:64])))


positions = st.one_of(st.integers(0, 63), st.integers(PAGE_BYTES, PAGE_BYTES + 64 + 20 * ENTRY_BYTES - 1))


@given(st.lists(st.tuples(positions, st.integers(0, 255)), min_size=1, max_size=6))
@settings(max_examples=400, deadline=None)
def test_a_forged_footer_with_right_hashes_is_consistent_or_refused(changes: list[tuple[int, int]]) -> None:
    data = bytearray(pack_footer(make_footer()))
    for offset, value in changes:
        data[offset] = value
    rehash(data)
    try:
        footer = parse(bytes(data))
    except FooterError:
        return
    starts = footer.entries["page"].astype(np.int64)
    ends = starts + 1 + -(-footer.entries["stored_length"].astype(np.int64) // PAGE_BYTES)
    assert (starts[1:] >= ends[:-1]).all()
    assert ends.max(initial=0) <= DATA_PAGES
    assert footer.entries["namespace_index"].max(initial=0) < max(1, len(footer.namespaces))


def test_the_place_kept_for_a_footer_holds_the_worst_case() -> None:
    for segment_bytes in (32 << 10, 256 << 10, 1 << 20, 256 << 20):
        data_pages = (segment_bytes - footer_bytes_for(segment_bytes)) // PAGE_BYTES
        records = data_pages // 2
        assert PAGE_BYTES + records * ENTRY_BYTES + min(records, 1024) * 32 <= footer_bytes_for(segment_bytes)


def test_a_tombstone_ends_one_life_only() -> None:
    page = pack_tombstone(7, 99)
    assert is_tombstone(page, 7, 99)
    assert not is_tombstone(page, 7, 98)
    assert not is_tombstone(page, 6, 99)
    with pytest.raises(FooterError):
        unpack_head(page, 7, 99, DATA_PAGES)
