"""Streams of clients without shared memory, encoded: the same bytes both ways, beside clients that read no
codec, and what is damaged on the way is a miss or a refusal, never another byte."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from numpy.typing import NDArray

from kvtier.clients import Client, Geometry, NamespaceIdentity
from kvtier.clients.errors import KvtierError
from kvtier.clients.links.remote import GrpcLink
from kvtier.clients.memory.buffers import Pieces
from kvtier.clients.operations import stream_codecs
from kvtier.clients.options import Limits
from kvtier.tiers.codecs import streaming
from kvtier.tiers.codecs.base import Shape
from kvtier.v1 import kvcache_pb2
from kvtier.v1.conversions import identity_to_wire
from kvtier.v1.kvcache_pb2_grpc import KVCacheServiceStub

from ..contracts.kv_values import values_like_kv
from ..daemon import PATIENT, Daemon

GEOMETRY = Geometry(
    num_layers=4, num_kv_heads=4, head_dim=64, block_tokens=64, dtype="bfloat16", layers_per_group=2
)
WHOLE = Shape(4, 2, 64, 4, 64, "bfloat16")
IDENTITY = NamespaceIdentity(hashlib.sha256(b"streams").digest(), GEOMETRY)
NUM_BLOCKS = 24
NAMES = [hashlib.sha256(b"s%d" % i).digest() for i in range(NUM_BLOCKS)]


def blocks_like_kv() -> NDArray[np.uint8]:
    """Return blocks of a transformer; the last one is noise, which no codec makes shorter."""
    data = np.concatenate([values_like_kv(WHOLE, seed) for seed in range(NUM_BLOCKS)])
    data[-GEOMETRY.block_bytes :] = np.random.default_rng(1).integers(0, 256, GEOMETRY.block_bytes, np.uint8)
    return data


@pytest.fixture(params=["exponents", "planes", "auto", "identity"])
def daemon(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Daemon]:
    with Daemon(tmp_path, settings=(f"compression.codec={request.param}",)) as started:
        started.remote_codec = request.param  # type: ignore[attr-defined]
        yield started


def counters(daemon: Daemon) -> dict[str, int]:
    return dict(daemon.status().counters)


def of_streams(counted: dict[str, int]) -> dict[str, int]:
    return {name: number for name, number in counted.items() if "stream" in name}


def test_both_ways_and_beside_clients_that_read_no_codec(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = blocks_like_kv()
    with (
        Client(daemon.target, shared_memory=False, timeout=PATIENT) as remote,
        Client(daemon.target, timeout=PATIENT) as local,
    ):
        space = remote.register(IDENTITY)
        assert remote.put(space, NAMES, data).complete
        np.testing.assert_array_equal(local.get(local.register(IDENTITY), NAMES).data, data)
        for _ in range(4):
            np.testing.assert_array_equal(remote.get(space, NAMES).data, data)
        monkeypatch.setattr(stream_codecs, "readable_codecs", lambda: ())
        monkeypatch.setattr("kvtier.clients.operations.gets.readable_codecs", lambda: ())
        before = of_streams(counters(daemon))
        with Client(daemon.target, shared_memory=False, timeout=PATIENT) as plain:
            space = plain.register(IDENTITY)
            np.testing.assert_array_equal(plain.get(space, NAMES).data, data)
            other = [hashlib.sha256(name).digest() for name in NAMES]
            assert plain.put(space, other, data).complete
            np.testing.assert_array_equal(local.get(local.register(IDENTITY), other).data, data)
        assert of_streams(counters(daemon)) == before
    found = counters(daemon)
    if daemon.remote_codec in ("exponents", "planes"):  # type: ignore[attr-defined]
        raw_bytes = (NUM_BLOCKS - 1) * GEOMETRY.block_bytes
        assert found["stream_received_raw_bytes"] == raw_bytes
        assert found["stream_sent_raw_bytes"] == 4 * raw_bytes
        assert found["stream_sent_encoded_bytes"] < 0.75 * found["stream_sent_raw_bytes"]
    if daemon.remote_codec == "identity":  # type: ignore[attr-defined]
        assert not found.get("stream_sent_raw_bytes")
        assert not found.get("stream_received_raw_bytes")


@pytest.fixture
def exponents_daemon(tmp_path: Path) -> Iterator[Daemon]:
    with Daemon(tmp_path, settings=("compression.codec=exponents",)) as started:
        yield started


def test_a_get_into_pieces(exponents_daemon: Daemon) -> None:
    """Where a runtime's pages scatter a fragment, it is decoded aside and spread."""
    data = blocks_like_kv()
    piece_bytes = GEOMETRY.layer_bytes
    pages = np.zeros((GEOMETRY.num_layers, NUM_BLOCKS, piece_bytes), np.uint8)  # layer by layer
    starts = pages.ctypes.data + np.arange(GEOMETRY.num_layers) * NUM_BLOCKS * piece_bytes
    addresses = starts[None, :] + np.arange(NUM_BLOCKS)[:, None] * piece_bytes
    with Client(exponents_daemon.target, shared_memory=False, timeout=PATIENT) as remote:
        space = remote.register(IDENTITY)
        assert remote.put(space, NAMES, data).complete
        report = remote.get(space, NAMES, into=Pieces(addresses.astype(np.int64), piece_bytes, pages))
        assert report.num_blocks == NUM_BLOCKS
    expected = data.reshape(NUM_BLOCKS, GEOMETRY.num_layers, piece_bytes).swapaxes(0, 1)
    np.testing.assert_array_equal(pages, expected)


def test_what_is_damaged_on_its_way_down_is_a_miss(
    exponents_daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = blocks_like_kv()
    with Client(exponents_daemon.target, shared_memory=False, timeout=PATIENT) as remote:
        space = remote.register(IDENTITY)
        assert remote.put(space, NAMES, data).complete
        take = stream_codecs.EncodedReader.take

        def flipped(self: stream_codecs.EncodedReader, message: object) -> bool:
            if message.block == 5 and message.group == 1:  # type: ignore[attr-defined]
                chunk = bytearray(message.chunk)  # type: ignore[attr-defined]
                chunk[len(chunk) // 2] ^= 1
                message.chunk = bytes(chunk)  # type: ignore[attr-defined]
            return take(self, message)  # type: ignore[arg-type]

        with monkeypatch.context() as patched:
            patched.setattr(stream_codecs.EncodedReader, "take", flipped)
            report = remote.get(space, NAMES)
            assert report.num_blocks == 5
            np.testing.assert_array_equal(report.data, data[: 5 * GEOMETRY.block_bytes])
        np.testing.assert_array_equal(remote.get(space, NAMES).data, data)


def test_what_is_damaged_on_its_way_up_is_refused_as_a_whole(
    exponents_daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = blocks_like_kv()
    encode = streaming.StreamEncoder.encode
    for how in ("payload", "checksum", "codec"):

        def damaged(self: object, *arguments: object, how: str = how) -> object:
            found = encode(self, *arguments)  # type: ignore[arg-type]
            if found is None:
                return None
            if how == "payload":
                return found._replace(stored=found.stored[:-9] + bytes(9))
            return found._replace(checksum=bytes(16)) if how == "checksum" else found._replace(codec_id=5)

        with Client(exponents_daemon.target, shared_memory=False, timeout=PATIENT) as remote:
            space = remote.register(IDENTITY)
            with monkeypatch.context() as patched:
                patched.setattr(streaming.StreamEncoder, "encode", damaged)
                with pytest.raises(KvtierError, match=r"checksum says|put_codecs"):
                    remote.put(space, NAMES, data)
            assert remote.lookup(space, NAMES).num_blocks == 0
    with Client(exponents_daemon.target, shared_memory=False, timeout=PATIENT) as remote:
        assert remote.put(remote.register(IDENTITY), NAMES, data).complete


@pytest.mark.parametrize("chunk_bytes", [100_000, 1 << 20])
@pytest.mark.parametrize("takes_first_chunks", [False, True])
def test_a_fragment_begins_in_its_announcement_where_the_daemon_reads_that(
    exponents_daemon: Daemon, monkeypatch: pytest.MonkeyPatch, chunk_bytes: int, takes_first_chunks: bool
) -> None:
    """One from before does not say that it does, and gets it in messages of their own."""
    learn = stream_codecs.StreamCodecs.learn
    sent = []
    messages_of = stream_codecs.EncodedWriter._messages_of

    def told(self: stream_codecs.StreamCodecs, response: kvcache_pb2.RegisterNamespaceResponse) -> None:
        assert response.takes_first_chunks
        response.takes_first_chunks = takes_first_chunks
        learn(self, response)

    def kept(self: stream_codecs.EncodedWriter, *arguments: Any) -> Iterator[kvcache_pb2.PutRequest]:
        for message in messages_of(self, *arguments):
            sent.append(message)
            yield message

    monkeypatch.setattr(stream_codecs.StreamCodecs, "learn", told)
    monkeypatch.setattr(stream_codecs.EncodedWriter, "_messages_of", kept)
    data = blocks_like_kv()
    limits = Limits(chunk_bytes=chunk_bytes)
    with Client(exponents_daemon.target, shared_memory=False, timeout=PATIENT, limits=limits) as remote:
        space = remote.register(IDENTITY)
        assert remote.put(space, NAMES, data).complete
        np.testing.assert_array_equal(remote.get(space, NAMES).data, data)
    announced = [one.encoded for one in sent if one.WhichOneof("part") == "encoded"]
    assert len(announced) == (NUM_BLOCKS - 1) * GEOMETRY.num_groups
    for one in announced:
        assert len(one.first_chunk) == (min(one.length, chunk_bytes) if takes_first_chunks else 0)


def test_small_fragments_share_messages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight in a megabyte, both ways, and one by one to a client that does not say that it reads several."""
    num_sent = []
    send = GrpcLink.send

    def counted(self: GrpcLink, call: str, request: Any, timeout_s: float) -> int:
        if call == "Put":
            request = list(request)
            num_sent.append(len(request))
        return send(self, call, iter(request) if call == "Put" else request, timeout_s)

    monkeypatch.setattr(GrpcLink, "send", counted)
    data = blocks_like_kv()
    with (
        Daemon(tmp_path, settings=("compression.codec=identity",)) as daemon,
        Client(daemon.target, shared_memory=False, timeout=PATIENT) as remote,
        grpc.insecure_channel(daemon.target) as channel,
    ):
        space = remote.register(IDENTITY)
        assert remote.put(space, NAMES, data).complete
        apart = [
            data[start : start + GEOMETRY.block_bytes].copy()
            for start in range(0, len(data), GEOMETRY.block_bytes)
        ]
        assert remote.put(space, [hashlib.sha256(name).digest() for name in NAMES], apart).complete
        np.testing.assert_array_equal(remote.get(space, NAMES).data, data)
        stub = KVCacheServiceStub(channel)
        client = stub.OpenClient(kvcache_pb2.OpenClientRequest(request_id="1"))
        number = stub.RegisterNamespace(
            kvcache_pb2.RegisterNamespaceRequest(identity=identity_to_wire(IDENTITY))
        ).namespace_id
        acquire = kvcache_pb2.AcquireRequest(
            client_id=client.client_id, namespace_id=number, prefix_hashes=b"".join(NAMES)
        )
        several, single = (
            list(stub.Get(kvcache_pb2.GetRequest(acquire=acquire, takes_several=takes)))
            for takes in (True, False)
        )
    num_fragments = NUM_BLOCKS * GEOMETRY.num_groups
    assert num_sent == [1 + num_fragments // 8] * 2
    assert (len(several), len(single)) == (num_fragments // 8 + 1, num_fragments + 1)
    assert not any(one.more_blocks for one in single)
    assert b"".join(one.chunk for one in several) == b"".join(one.chunk for one in single)


def test_a_profile_never_shortens_what_travels() -> None:
    """Only exact codecs have a number that a stream may name."""
    assert 5 not in streaming.usable_codecs()
    assert not streaming.decode_fragment(5, WHOLE, memoryview(bytes(8)), memoryview(bytearray(8)), b"")
