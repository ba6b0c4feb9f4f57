"""DataListener: accepts data connections of other hosts, and sends what their tickets stand for.

Connections are accepted and asked for tickets on the event loop; only handshakes are made, and bytes sent, in
threads. So anything that reaches the port, connects and sends nothing, or half a ticket, takes no thread, and
one that never showed a ticket makes room when there are too many connections, first one of the address that
has the most of them. A thread for each connection that begins a ticket was rejected: a dozen strangers held
up all hosts. A handshake takes 0.6 ms and more of anything that connects: on the event loop, a thousand a
second left it no time, so their steps share one thread. A host that takes nothing of what is sent to it is
left after STALL_S: what it was to read stays pinned, and a thread is bound, until then. So each ticket has a
thread: with half as many two hosts that stood still took them all, and others gave this host up.
"""

import asyncio
import logging
import socket
import ssl
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from ...sources.peers.connection import IDLE_S, TICKET_BYTES, ConnectionLost, bound_waits, break_off, settled
from ...sources.peers.sending import send_payloads
from ...tiers.codecs.streaming import CHECKSUM_BYTES, Encoded, StreamChoice, StreamEncoder
from ..errors import StartError
from ..server.unix_listener import rest
from ..tasks import end
from .fleet_tls import FleetTls
from .tickets import MAX_TICKETS, DataTicket, PeerService

log = logging.getLogger(__name__)

MAX_CONNECTIONS: Final = 512
MAX_LINKS: Final = 256  # of which it is remembered whether encoding pays
READ_S: Final = 2.0  # for a ticket, from its first byte on
STALL_S: Final = 2.0


class DataListener:
    """Listens at `host`:`port` (0: a port that the kernel chooses). Owned by the event loop.

    Without `tls` every connection is plain. Raises StartError when it cannot listen."""

    def __init__(
        self,
        host: str,
        port: int,
        tickets: PeerService,
        tls: FleetTls | None,
        clock: Callable[[], float],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._tickets = tickets
        self._tls = tls
        self._clock = clock
        self._senders = ThreadPoolExecutor(MAX_TICKETS, thread_name_prefix="kvtier-send")
        self._prover = ThreadPoolExecutor(1, thread_name_prefix="kvtier-prove")
        self._connections: set[asyncio.Task[None]] = set()
        self._strangers: dict[asyncio.Task[None], str] = {}  # by address; never showed a ticket, oldest first
        self._encoders: dict[tuple[str, frozenset[int]], StreamEncoder] = {}  # of links, by address
        self._lock = threading.Lock()  # of `_encoders`
        self._is_stopping = False
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            self._listener = socket.create_server((host, port), family=family, backlog=128)
        except OSError as problem:
            raise StartError(
                f"peers.data_port: cannot listen at {host}:{port}: {problem.strerror}"
            ) from problem
        self._listener.setblocking(False)
        tickets.data_port = self.port = self._listener.getsockname()[1]
        self._loop.add_reader(self._listener, self._accept)

    async def stop(self) -> None:
        """Close every connection; nothing is read from memory afterwards. Idempotent."""
        self._is_stopping = True
        if self._listener.fileno() >= 0:
            self._loop.remove_reader(self._listener)
            self._listener.close()
        await asyncio.to_thread(self._senders.shutdown)
        await end(self._connections)
        await asyncio.to_thread(self._prover.shutdown)

    def _accept(self) -> None:
        try:
            connection, peer = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionError):
            return
        except OSError as problem:  # out of descriptors: the peer waits in the backlog
            log.warning("cannot accept a data connection: %s; raise `ulimit -n`", problem.strerror)
            rest(self._listener, self._accept)
            return
        if len(self._connections) >= MAX_CONNECTIONS and not self._drop_stranger():
            connection.close()
            return
        task = self._loop.create_task(self._serve(connection))
        self._connections.add(task)
        self._strangers[task] = peer[0]
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._connections.discard(task)
        self._strangers.pop(task, None)

    def _drop_stranger(self) -> bool:
        """End the oldest connection that never showed a ticket, of the address that has most of those; False:
        there is none."""
        if not self._strangers:
            return False
        [(address, _)] = Counter(self._strangers.values()).most_common(1)
        stranger = next(one for one, known in self._strangers.items() if known == address)
        self._forget(stranger)
        return stranger.cancel()

    async def _serve(self, connection: socket.socket) -> None:
        """Answer one ticket after the other, until the other end leaves or does what no host should."""
        try:
            connection.setblocking(False)
            await self._ready(connection)
            async with asyncio.timeout(READ_S):
                if self._tls is not None:
                    connection = await self._encrypted(connection, self._tls)
                number = await self._read_ticket(connection)
            while (ticket := self._tickets.take(number)) is not None:
                task = asyncio.current_task()
                assert task is not None
                self._strangers.pop(task, None)
                if not await self._loop.run_in_executor(self._senders, self._send, connection, ticket):
                    return
                connection.setblocking(False)
                if not (isinstance(connection, ssl.SSLSocket) and connection.pending()):
                    async with asyncio.timeout(IDLE_S):  # of a host that died it is never heard
                        await self._ready(connection)
                async with asyncio.timeout(READ_S):
                    number = await self._read_ticket(connection)
        except (OSError, ConnectionLost, RuntimeError) as problem:  # the last: no thread begins at the end
            log.debug("data connection: %s", problem)
        finally:
            break_off(connection)

    async def _ready(self, connection: socket.socket, is_to_write: bool = False) -> None:
        """Wait until something can be read from a socket, or written to it."""
        descriptor, ready = connection.fileno(), self._loop.create_future()
        add, remove = self._loop.add_reader, self._loop.remove_reader
        if is_to_write:
            add, remove = self._loop.add_writer, self._loop.remove_writer

        def wake() -> None:
            if not ready.done():
                ready.set_result(None)

        add(descriptor, wake)
        try:
            await ready
        finally:
            remove(descriptor)

    async def _encrypted(self, connection: socket.socket, tls: FleetTls) -> ssl.SSLSocket:
        """Return the connection with TLS. Raises OSError; ConnectionLost when the other end is no host."""
        context = await asyncio.to_thread(tls.context, is_server=True)
        encrypted = context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        try:
            while True:
                try:
                    await self._in_turn(encrypted.do_handshake)
                    break
                except ssl.SSLWantReadError:
                    await self._ready(encrypted)
                except ssl.SSLWantWriteError:
                    await self._ready(encrypted, is_to_write=True)
            tls.check_name(encrypted)
        except BaseException:
            encrypted.close()
            raise
        return encrypted

    async def _in_turn(self, step: Callable[[], None]) -> None:
        """Run a step of a handshake in the thread of all handshakes. Its socket stays open until it ended."""
        await settled(self._loop.run_in_executor(self._prover, step))

    async def _read_ticket(self, connection: socket.socket) -> bytes:
        found = b""
        while len(found) < TICKET_BYTES:
            try:
                part = connection.recv(TICKET_BYTES - len(found))
            except (BlockingIOError, ssl.SSLWantReadError):
                await self._ready(connection)
                continue
            if not part:
                raise ConnectionLost("the other end closed the connection")
            found += part
        return found

    # ------------------------------------------------------------------------------------- threads

    def _choice(
        self, connection: socket.socket, ticket: DataTicket
    ) -> tuple[StreamChoice, Callable[[int], Encoded | None] | None]:
        """Return how to send a ticket's payloads: encoded where the policy says so, or where it was measured
        to be sooner at the fetcher's address."""
        coding = ticket.coding
        if coding is None:
            return StreamChoice(None), None
        key = connection.getpeername()[0], coding.codec_ids
        with self._lock:
            encoder = self._encoders.pop(key, None) or StreamEncoder(tuple(coding.codec_ids))
            self._encoders[key] = encoder
            if len(self._encoders) > MAX_LINKS:
                del self._encoders[next(iter(self._encoders))]
        choices = [encoder.choose(shape, coding.name) for shape in coding.shapes]
        first = next((one for one in choices if one.codec is not None), None)
        if first is None:
            return choices[0], None

        def encode(number: int) -> Encoded | None:
            group = number // coding.num_blocks
            codec, start = choices[group].codec, number * CHECKSUM_BYTES
            checksum = coding.checksums[start : start + CHECKSUM_BYTES]
            if codec is None:
                return None
            payload = ticket.payloads[number]
            coded = encoder.encode(codec, coding.shapes[group], payload, checksum)
            if coded is not None:
                ticket.saved_bytes += len(payload) - len(coded.stored)
            return coded

        return first, encode

    def _send(self, connection: socket.socket, ticket: DataTicket) -> bool:
        """Send what a ticket stands for; whether all of it has arrived. Nothing reads it afterwards."""
        is_sent, heard_at = False, self._clock()

        def check(is_moving: bool) -> None:
            nonlocal heard_at
            now = self._clock()
            heard_at = now if is_moving else heard_at
            if self._is_stopping or now >= min(ticket.ends_at, heard_at + STALL_S):
                raise ConnectionLost("time is over")

        try:
            bound_waits(connection)
            choice, encode = self._choice(connection, ticket)
            began_at = self._clock()
            send_payloads(connection, ticket.payloads, check, encode)
            choice.count_sent(ticket.num_bytes, self._clock() - began_at)
            is_sent = True
        except (OSError, ConnectionLost) as problem:
            log.debug("data connection: %s", problem)
            break_off(connection)
        finally:
            self._loop.call_soon_threadsafe(self._tickets.end, ticket, is_sent)
        return is_sent
