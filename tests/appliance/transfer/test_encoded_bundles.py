"""What lies in a store is not what was put: encrypted bundles, and encoded ones."""

import asyncio
import importlib.util
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import xxhash
import zstandard

from kvtier.appliance.core.events import CopyFinished, ExportFinished, SourceSearched
from kvtier.appliance.core.instructions import ExportBundle, SearchBundles
from kvtier.appliance.transfer.object_edge import EPOCH_DAYS
from kvtier.sources.objects.bundle import StoredFragment, write_bundle
from kvtier.sources.objects.keys import Epochs, bundle_key
from kvtier.sources.objects.layout import BundleChain, unpack_head
from kvtier.tiers.base import Cause
from kvtier.tiers.block import Tier
from kvtier.tiers.codecs.registry import codec_named

from ..loops import run
from .edge_host import (
    BLUE,
    DEADLINE_S,
    GEOMETRY,
    IDENTITY,
    MASTER,
    NAMES,
    RED,
    Host,
    closed,
    exported,
    fetched,
)

if importlib.util.find_spec("obstore") is None:
    pytest.skip("no object stores: `pip install obstore`", allow_module_level=True)


def objects(folder: Path) -> list[Path]:
    """Return the bundles in a folder."""
    return sorted(path for path in folder.glob("v1/b/*/*/*/*") if "#" not in path.name)


def test_an_encrypted_bundle_is_read_by_hosts_with_the_master_key_and_tells_others_nothing(
    tmp_path: Path,
) -> None:
    async def scene() -> None:
        one, other = Host(tmp_path, MASTER, RED), Host(tmp_path, MASTER, RED)
        export = await exported(one)
        await other.open()
        other.edge.execute(SearchBundles(1, RED, [NAMES[-1], b"x" * 32]))
        assert await other.last(SourceSearched) == SourceSearched(1, 1, 1)
        fetch = other.fetch()
        other.edge.execute(fetch)
        await other.last(CopyFinished, 2)
        items = [item for _, part in fetch.batches for item in part]
        assert other.bytes_at(items) == [label.checksum for _, _, label in export.fragments]
        assert other.causes() == {10: {None}, 11: {None}}
        await closed(one)
        await closed(other)
        [path] = objects(tmp_path)
        everything = path.read_bytes()
        for secret in (*NAMES, RED.digest, *(label.checksum for _, _, label in export.fragments)):
            assert secret not in everything
            assert secret.hex() not in str(path)
        head = unpack_head(everything)
        assert head.chain.is_hidden
        plain_host = Host(tmp_path, identity=RED)
        assert await fetched(plain_host) == {10: {Cause.SOURCE_GONE}, 11: {Cause.SOURCE_GONE}}
        await closed(plain_host)

    run(scene())


def test_one_tenant_cannot_read_anothers_bundle(tmp_path: Path) -> None:
    """Not even when a writer of the bucket puts it where it would be read."""

    async def scene() -> None:
        red, blue = Host(tmp_path, MASTER, RED), Host(tmp_path, MASTER, BLUE)
        await exported(red)
        await exported(blue)
        of_red, of_blue = sorted(objects(tmp_path), key=lambda path: path.stat().st_mtime_ns)
        of_red.write_bytes(of_blue.read_bytes())
        assert await fetched(red) == {10: {Cause.WRONG_IDENTITY}, 11: {Cause.WRONG_IDENTITY}}
        await closed(red)
        await closed(blue)

    run(scene())


def _swap_payloads(whole: bytes) -> bytes:
    """Exchange two payloads of one group, their entries and envelopes; hash the head again."""
    head = unpack_head(whole)
    changed = bytearray(whole)
    (a, b), (c, d) = head.span(0, 0), head.span(0, 1)
    changed[a:b], changed[c:d] = whole[c:d], whole[a:b]
    entries = 136 + 32 * head.num_blocks
    envelopes = entries + 48 * len(head.entries)
    for start, length in ((entries, 48), (envelopes, 64)):
        one, two = whole[start : start + length], whole[start + length : start + 2 * length]
        changed[start : start + 2 * length] = two + one
    end = envelopes + 64 * len(head.entries)
    changed[end : end + 16] = xxhash.xxh3_128_digest(bytes(changed[:end]))
    return bytes(changed)


@pytest.mark.parametrize(
    ("damage", "causes"),
    [
        (lambda whole: whole[:-1], {10: {None}, 11: {Cause.SHORT_TRANSFER}}),
        (
            lambda whole: whole[:-5] + bytes([whole[-5] ^ 1]) + whole[-4:],
            {10: {None}, 11: {None, Cause.NOT_AUTHENTIC}},
        ),
        (_swap_payloads, {10: {None, Cause.NOT_AUTHENTIC}, 11: {None}}),
        (
            lambda whole: whole[:100] + bytes([whole[100] ^ 1]) + whole[101:],
            {10: {Cause.WRONG_IDENTITY}, 11: {Cause.WRONG_IDENTITY}},
        ),
    ],
    ids=["cut", "flipped", "swapped", "head"],
)
def test_a_changed_encrypted_bundle_is_a_miss(
    tmp_path: Path, damage: Callable[[bytes], bytes], causes: dict[int, set[Cause | None]]
) -> None:
    async def scene() -> None:
        one, other = Host(tmp_path, MASTER, RED), Host(tmp_path, MASTER, RED)
        await exported(one)
        [path] = objects(tmp_path)
        path.write_bytes(damage(path.read_bytes()))
        assert await fetched(other) == causes
        await closed(one)
        await closed(other)

    run(scene())


def test_a_plain_bundle_under_a_hidden_name_is_not_believed(tmp_path: Path) -> None:
    async def scene() -> None:
        (tmp_path / "plain").mkdir()
        one, other = Host(tmp_path, MASTER, RED), Host(tmp_path / "plain", identity=RED)
        await exported(one)
        await exported(other)
        [path], [plain] = objects(tmp_path), objects(tmp_path / "plain")
        path.write_bytes(plain.read_bytes())
        assert await fetched(one) == {10: {Cause.WRONG_IDENTITY}, 11: {Cause.WRONG_IDENTITY}}
        await closed(one)
        await closed(other)

    run(scene())


def test_after_erasing_nothing_is_read_and_the_tenant_gets_another_key(tmp_path: Path) -> None:
    async def scene() -> None:
        one, other = Host(tmp_path, MASTER, RED), Host(tmp_path, MASTER, RED)
        await exported(one)
        [path] = objects(tmp_path)
        kept = path.read_bytes()  # a copy that its thief keeps
        assert one.keys is not None
        before = one.keys.key_for_writing("tenant:red")
        one.edge.bar("tenant:red")
        refused = one.filled(2)
        one.edge.execute(refused)
        assert not (await one.last(ExportFinished, 2)).is_stored, "at once"
        assert await one.edge.erase("tenant:red") == 1
        one.edge.admit("tenant:red")
        assert objects(tmp_path) == []
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(kept)
        assert await fetched(other) == {10: {Cause.NO_KEY}, 11: {Cause.NO_KEY}}
        one.edge.execute(one.filled(3))
        assert (await one.last(ExportFinished, 3)).is_stored
        assert one.keys.key_for_writing("tenant:red") != before
        assert len(objects(tmp_path)) == 2, "under a name of its own"
        await closed(one)
        await closed(other)

    run(scene())


def test_a_store_with_another_master_key_is_not_used(tmp_path: Path) -> None:
    async def scene() -> None:
        one, other = Host(tmp_path, MASTER, RED), Host(tmp_path, bytes(32), RED)
        await exported(one)
        other.edge.start()
        async with asyncio.timeout(DEADLINE_S):
            while not other.edge.status().problem:
                await asyncio.to_thread(time.sleep, 0.01)
        assert "another master key" in other.edge.status().problem
        assert not other.edge.status().is_open
        other.edge.execute(other.fetch())
        assert other.causes() == {10: {Cause.SOURCE_GONE}, 11: {Cause.SOURCE_GONE}}
        await closed(one)
        await closed(other)

    run(scene())


# ----------------------------------------------------------------------------------------- codecs


def compressible(host: Host) -> ExportBundle:
    """Put a bundle of few different numbers into memory; return its export."""
    fragments = []
    for place, label in host.places():
        payload = np.arange(label.raw_length, dtype=np.uint16) % (5 + label.position) + label.group
        label.checksum = host.memory.write(place, label, payload.astype(np.uint8).data)
        fragments.append((Tier.DRAM, place, label))
    return ExportBundle(1, host.bundle, fragments)


@pytest.mark.parametrize("master", [b"", MASTER], ids=["plain", "encrypted"])
@pytest.mark.parametrize("codec", ["planes", "zstd"])
def test_bundles_are_encoded_and_decoded_bit_for_bit(tmp_path: Path, codec: str, master: bytes) -> None:
    async def scene() -> None:
        one, other = Host(tmp_path, master, RED), Host(tmp_path, master, RED)
        one.edge.codecs = lambda identity: [codec_named(codec)] * identity.geometry.num_groups
        await one.open()
        export = compressible(one)
        one.edge.execute(export)
        assert (await one.last(ExportFinished)).is_stored
        [path] = objects(tmp_path)
        head = unpack_head(path.read_bytes())
        assert set(head.entries["codec"]) == {codec_named(codec).codec_id}
        assert head.total_bytes < sum(label.raw_length for _, _, label in export.fragments)
        await other.open()
        fetch = other.fetch()
        other.edge.execute(fetch)
        await other.last(CopyFinished, 2)
        assert other.causes() == {10: {None}, 11: {None}}
        items = [item for _, part in fetch.batches for item in part]
        assert other.bytes_at(items) == [label.checksum for _, _, label in export.fragments]
        await closed(one)
        await closed(other)

    run(scene())


def test_what_no_codec_makes_shorter_is_stored_as_it_is(tmp_path: Path) -> None:
    async def scene() -> None:
        host = Host(tmp_path)
        host.edge.codecs = lambda identity: [codec_named("zstd"), None]
        await exported(host)
        [path] = objects(tmp_path)
        assert not unpack_head(path.read_bytes()).entries["codec"].any()
        await closed(host)

    run(scene())


def test_a_payload_that_decodes_to_more_than_it_says_is_a_miss(tmp_path: Path) -> None:
    async def scene() -> None:
        host = Host(tmp_path)
        await host.open()
        bomb = zstandard.ZstdCompressor().compress(bytes(64 << 20))
        length = GEOMETRY.fragment_bytes[0]
        chain = BundleChain(IDENTITY.digest, b"", 0, tuple(NAMES))
        one = StoredFragment(memoryview(bomb[:length]), length, bytes(16), codec_named("zstd").codec_id)
        bundle = write_bundle(chain, GEOMETRY.num_groups, [one] * GEOMETRY.num_groups * len(NAMES))
        epoch = Epochs(EPOCH_DAYS).present(time.time())
        key = str(bundle_key(epoch, "", IDENTITY.digest, NAMES[-1]))
        await asyncio.to_thread(host.store.create, key, bundle.data)
        host.edge.execute(host.fetch())
        await host.last(CopyFinished, 2)
        assert host.causes() == {10: {Cause.WRONG_CHECKSUM}, 11: {Cause.WRONG_CHECKSUM}}
        await closed(host)

    run(scene())
