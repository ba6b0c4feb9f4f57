"""A data connection carries payloads byte for byte, or ends in an error."""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import xxhash

from kvtier.sources.peers.connection import (
    CODED_HEADER,
    CODED_MAGIC,
    HEADER,
    MAGIC,
    TICKET_BYTES,
    ConnectionLost,
    bound_waits,
    is_quiet,
)
from kvtier.sources.peers.receiving import PayloadReader, connect
from kvtier.sources.peers.sending import send_payloads
from kvtier.tiers.codecs.base import Shape
from kvtier.tiers.codecs.registry import codec_named
from kvtier.tiers.codecs.streaming import StreamEncoder, usable_codecs

from ...contracts.kv_values import values_like_kv
from ...waiting import until

TICKET = bytes(range(TICKET_BYTES))
PATIENCE_S = 60.0


def no_check(*_: float) -> None:
    """Wait for ever."""


@contextmanager
def both_ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Return (fetcher, holder), connected over loopback."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        fetcher = connect("127.0.0.1", listener.getsockname()[1], PATIENCE_S)
        holder, _ = listener.accept()
    bound_waits(holder)
    with fetcher, holder:
        yield fetcher, holder


@contextmanager
def beside(task: Callable[[], object]) -> Iterator[None]:
    """Run a task in a thread meanwhile."""
    thread = threading.Thread(target=task)
    thread.start()
    try:
        yield
    finally:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


@pytest.mark.parametrize("size", [1, 4096, 3_000_001])
def test_payloads_arrive_as_they_lie_in_memory(size: int) -> None:
    data = os.urandom(3 * size)
    payloads = [memoryview(data)[2 * size :], memoryview(data)[:size]]
    tickets = []
    with both_ends() as (fetcher, holder):

        def hold() -> None:
            for _ in range(2):  # one ticket after the other
                tickets.append(holder.recv(TICKET_BYTES, socket.MSG_WAITALL))
                send_payloads(holder, payloads, no_check)

        with beside(hold):
            for _ in range(2):
                reader = PayloadReader(fetcher, time.monotonic, no_check)
                reader.begin(TICKET, 2)
                found = [bytearray(size), bytearray(size)]
                digests = reader.fill_many([memoryview(one) for one in found])
                reader.end()
                assert found == payloads
                assert digests == [xxhash.xxh3_128_digest(one) for one in payloads]
                assert is_quiet(fetcher)
    assert tickets == [TICKET, TICKET]


SHAPE = Shape(4, 2, 64, 4, 64, "bfloat16")


def test_encoded_payloads_arrive_as_they_were() -> None:
    encoder, codec = StreamEncoder(usable_codecs()), codec_named("exponents")
    noise = np.random.default_rng(1).integers(0, 256, SHAPE.raw_bytes, np.uint8)
    payloads = [memoryview(one.tobytes()) for one in (values_like_kv(SHAPE, 1), noise)]
    coded = [encoder.encode(codec, SHAPE, payload) for payload in payloads]
    assert [one is None for one in coded] == [False, True]  # noise goes as it is
    with both_ends() as (fetcher, holder):

        def hold() -> None:
            holder.recv(TICKET_BYTES, socket.MSG_WAITALL)
            send_payloads(holder, payloads, no_check, coded.__getitem__)

        with beside(hold):
            reader = PayloadReader(fetcher, time.monotonic, no_check)
            reader.begin(TICKET, 2)
            found = [bytearray(SHAPE.raw_bytes) for _ in payloads]
            digests = reader.fill_many([memoryview(one) for one in found], SHAPE)
            reader.end()
    assert found == payloads
    assert digests == [xxhash.xxh3_128_digest(one) for one in payloads]


@pytest.mark.parametrize(
    ("codec_id", "length"),
    [(0, 1000), (0, SHAPE.raw_bytes + 1), (1, 0), (1, SHAPE.raw_bytes + 1), (1, 1 << 31), (77, 9), (1, 999)],
)
def test_an_encoding_that_makes_no_sense_is_an_end_or_has_no_checksum(codec_id: int, length: int) -> None:
    place = memoryview(bytearray(SHAPE.raw_bytes))
    with both_ends() as (fetcher, holder):
        holder.sendall(HEADER.pack(CODED_MAGIC, 1) + CODED_HEADER.pack(codec_id, length) + bytes(1000))
        reader = PayloadReader(fetcher, time.monotonic, no_check)
        reader.begin(TICKET, 1)
        if 0 < length <= SHAPE.raw_bytes and codec_id:
            assert reader.fill_many([place], SHAPE) == [b""]
        else:
            with pytest.raises(ConnectionLost):
                reader.fill_many([place], SHAPE)


def test_encoded_payloads_that_were_not_asked_for_are_an_end() -> None:
    with both_ends() as (fetcher, holder):
        holder.sendall(HEADER.pack(CODED_MAGIC, 1))
        reader = PayloadReader(fetcher, time.monotonic, no_check)
        reader.begin(TICKET, 1)
        with pytest.raises(ConnectionLost):
            reader.fill_many([memoryview(bytearray(1000))])


def test_payloads_that_come_slowly_are_whole_and_the_caller_hears_of_each_wait() -> None:
    """Cut at bytes that are no boundaries, with a wait of the kernel that ends in between."""
    data, looked = os.urandom(1000), list[float]()
    places, is_late = [bytearray(400), bytearray(600)], threading.Event()

    def check(silent_s: float) -> None:
        looked.append(silent_s)
        if silent_s:
            is_late.set()

    with both_ends() as (fetcher, holder):

        def hold() -> None:
            for start, end in ((0, 1), (1, 450), (450, 999), (999, 1000)):
                holder.sendall(data[start:end])
                assert is_late.wait(PATIENCE_S)
                is_late.clear()

        with beside(hold):
            reader = PayloadReader(fetcher, time.monotonic, check)
            digests = reader.fill_many([memoryview(one) for one in places])
            is_late.set()
    assert b"".join(places) == data
    assert digests == [xxhash.xxh3_128_digest(one) for one in (data[:400], data[400:])]
    assert max(looked) > 0.0


def test_a_lease_is_not_over_before_the_other_end_has_everything() -> None:
    ended = threading.Event()
    with both_ends() as (fetcher, holder):

        def hold() -> None:
            holder.recv(TICKET_BYTES, socket.MSG_WAITALL)
            send_payloads(holder, [memoryview(bytes(1000))], no_check)
            ended.set()

        with beside(hold):
            reader = PayloadReader(fetcher, time.monotonic, no_check)
            reader.begin(TICKET, 1)
            reader.fill_many([memoryview(bytearray(1000))])
            assert not ended.is_set()  # whatever was sent: it waits for the acknowledgement
            reader.end()
        assert ended.is_set()


@pytest.mark.parametrize(
    "sent",
    [b"", b"kv", b"HTTP/1.1", HEADER.pack(MAGIC, 3), HEADER.pack(MAGIC, 2) + b"a" * 999],
    ids=["nothing", "half a header", "another protocol", "another number", "one byte less"],
)
def test_a_holder_that_closes_early_is_an_error(sent: bytes) -> None:
    with both_ends() as (fetcher, holder):
        holder.sendall(sent)
        holder.shutdown(socket.SHUT_WR)
        with pytest.raises(ConnectionLost):
            read_two(fetcher)


def read_two(fetcher: socket.socket) -> None:
    reader = PayloadReader(fetcher, time.monotonic, no_check)
    reader.begin(TICKET, 2)
    reader.fill_many([memoryview(bytearray(500)) for _ in range(2)])


def test_a_holder_that_sends_nothing_is_left_when_the_caller_says_so() -> None:
    looked: list[float] = []

    def check(silent_s: float) -> None:
        looked.append(silent_s)
        if len(looked) == 3:
            raise ConnectionLost("enough")

    with both_ends() as (fetcher, _):
        with pytest.raises(ConnectionLost, match="enough"):
            PayloadReader(fetcher, time.monotonic, check).begin(TICKET, 1)
        assert looked == sorted(looked)


def test_more_than_was_announced_is_noticed() -> None:
    with both_ends() as (fetcher, holder):
        holder.sendall(HEADER.pack(MAGIC, 1) + b"a" * 10 + b"more")
        reader = PayloadReader(fetcher, time.monotonic, no_check)
        reader.begin(TICKET, 1)
        reader.fill(memoryview(bytearray(10)))
        reader.end()
        until(lambda: not is_quiet(fetcher))


@pytest.mark.parametrize("has_read", [False, True])
def test_a_fetcher_that_leaves_ends_the_sending(has_read: bool) -> None:
    with both_ends() as (fetcher, holder):
        if has_read:
            holder.send(b"a")
            fetcher.recv(1)
        fetcher.close()
        with pytest.raises((OSError, ConnectionLost)):
            send_payloads(holder, [memoryview(bytes(64 << 20))], no_check)


def test_a_fetcher_that_takes_nothing_is_left_when_the_caller_says_so() -> None:
    def check(is_moving: bool) -> None:
        if not is_moving:
            raise ConnectionLost("enough")

    with both_ends() as (_, holder), pytest.raises(ConnectionLost, match="enough"):
        send_payloads(holder, [memoryview(bytes(64 << 20))], check)
