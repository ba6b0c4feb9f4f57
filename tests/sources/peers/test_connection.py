"""A data connection carries payloads byte for byte, or ends in an error."""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from kvtier.sources.peers.connection import HEADER, MAGIC, TICKET_BYTES, ConnectionLost, bound_waits, is_quiet
from kvtier.sources.peers.receiving import PayloadReader, connect
from kvtier.sources.peers.sending import Piece, send_payloads

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
    memory = os.memfd_create("extent")
    data = os.urandom(3 * size)
    os.write(memory, data)
    pieces = [
        Piece(memory, 2 * size, memoryview(data)[2 * size :]),
        Piece(memory, 0, memoryview(data)[:size]),
    ]
    tickets = []
    with both_ends() as (fetcher, holder):

        def hold() -> None:
            for _ in range(2):  # one ticket after the other
                tickets.append(holder.recv(TICKET_BYTES, socket.MSG_WAITALL))
                send_payloads(holder, pieces, no_check)

        with beside(hold):
            for _ in range(2):
                reader = PayloadReader(fetcher, time.monotonic, no_check)
                reader.begin(TICKET, 2)
                found = [bytearray(size), bytearray(size)]
                for into in found:
                    reader.fill(memoryview(into))
                reader.end()
                assert found == [data[2 * size :], data[:size]]
                assert is_quiet(fetcher)
    assert tickets == [TICKET, TICKET]
    os.close(memory)


def test_a_lease_is_not_over_before_the_other_end_has_everything() -> None:
    memory = os.memfd_create("extent")
    os.write(memory, bytes(1000))
    ended = threading.Event()
    with both_ends() as (fetcher, holder):

        def hold() -> None:
            holder.recv(TICKET_BYTES, socket.MSG_WAITALL)
            send_payloads(holder, [Piece(memory, 0, memoryview(bytes(1000)))], no_check)
            ended.set()

        with beside(hold):
            reader = PayloadReader(fetcher, time.monotonic, no_check)
            reader.begin(TICKET, 1)
            reader.fill(memoryview(bytearray(1000)))
            assert not ended.is_set()  # whatever was sent: it waits for the acknowledgement
            reader.end()
        assert ended.is_set()
    os.close(memory)


@pytest.mark.parametrize(
    "sent",
    [b"", b"kv", b"HTTP/1.1", HEADER.pack(MAGIC, 3), HEADER.pack(MAGIC, 2) + b"a" * 99],
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
    reader.fill(memoryview(bytearray(100)))


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
        ends_at = time.monotonic() + PATIENCE_S
        while is_quiet(fetcher):
            assert time.monotonic() < ends_at


def test_a_fetcher_that_leaves_ends_the_sending() -> None:
    with both_ends() as (fetcher, holder):
        memory = os.memfd_create("extent")
        os.ftruncate(memory, 64 << 20)
        piece = Piece(memory, 0, memoryview(bytes(64 << 20)))
        fetcher.close()
        with pytest.raises((OSError, ConnectionLost)):
            send_payloads(holder, [piece], no_check)
        os.close(memory)
