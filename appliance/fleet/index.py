"""IndexedHosts: the other hosts of a directory, and an index that says what each holds.

A look asks for the first bundles of a chain in one batch, then for more while one host has all of them.
What it finds is remembered for a few seconds. Nothing here may hold up this host: an answer is waited for
LOOK_S, there are MAX_LOOKS at a time, of one tenant as many as it leaves free, and after one that failed none
is begun before a pause has passed, which doubles, and the directory has answered; then a single one tries.
Meanwhile there are no other hosts, and local service is as without them.

A host is asked by its life: one that was started anew refuses what its former life held, and what that one
left in the index means nothing.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import grpc

from ...sources.directories.addresses import DirectoryError
from ...sources.directories.opening import LOOK_S
from ...sources.directories.records import HostRecord, refusal_of
from ...sources.directories.redis_index import HolderIndex, bundle_key
from ...sources.peers.inventory import NAME_BYTES
from ...v1.peer_pb2_grpc import PeerServiceStub
from ..core.remembered import Remembered
from ..core.shares import Shares
from ..tasks import Tasks
from .finding import ChainPart, Held
from .fleet_host import FleetHost, open_channel
from .fleet_tls import FleetTls

log = logging.getLogger(__name__)

MAX_LOOKS: Final = 16
FIRST_STEP, MAX_STEP = 8, 64  # bundles asked for at a time
MAX_BUNDLES: Final = 1024  # of a chain
PRESENT_S, MISSING_S = 5.0, 1.0  # for which an answer is remembered
MAX_KNOWN: Final = 65_536  # answers, and blocks of awaited chains, in parts by tenant: 15 MB or so of each
TOLD_S: Final = 30.0  # for which what a host told of an awaited chain is believed
PAUSE_S, MAX_PAUSE_S = 1.0, 30.0


class IndexedHosts:
    """Owned by the event loop.

    `changed` is called when there is a host to ask, or none any more; `lost` when the index failed."""

    def __init__(
        self,
        index: HolderIndex,
        tls: FleetTls | None,
        changed: Callable[[], None],
        lost: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self._index = index
        self._tls = tls
        self._changed = changed
        self._lost = lost
        self._clock = clock
        self._lives: dict[int, FleetHost] = {}
        self._channels: dict[int, grpc.aio.Channel] = {}
        self._known: Remembered[bytes, tuple[frozenset[int], float]] = Remembered(MAX_KNOWN)
        self._told: Remembered[tuple[int, bytes, bytes], float] = Remembered(MAX_KNOWN)  # until when
        self._looks: Tasks[list[frozenset[int]]] = Tasks()
        self._shares = Shares(MAX_LOOKS)  # of them, by tenant
        self._closing: Tasks[None] = Tasks()
        self.is_open = False  # whether the index is asked
        self._is_proven = False  # a look has succeeded since it was opened
        self._pause_s = PAUSE_S
        self._closed_until = 0.0
        self.own: FleetHost | None = None
        self.counters: Counter[str] = Counter()

    # --------------------------------------------------------------------------------------- hosts

    def all(self) -> list[FleetHost]:
        """See KnownHosts."""
        return [*([self.own] if self.own is not None else []), *self._lives.values()]

    def live(self) -> list[FleetHost]:
        """See KnownHosts."""
        return [host for host in self._lives.values() if host.is_live] if self.is_open else []

    def at(self, address: str) -> FleetHost | None:
        """See KnownHosts. Of two lives the one that was met last."""
        found = [host for host in self._lives.values() if host.address == address and host.is_live]
        return found[-1] if found and self._reach(found[-1]) else None

    def told(self, host: FleetHost, digest: bytes, names: Sequence[bytes], tenant: str) -> None:
        """See KnownHosts. The index is told too late of blocks that are awaited, and of bundles only."""
        until = self._clock() + TOLD_S
        for name in names:
            self._told.put(tenant, (host.epoch, digest, name), until)

    def set_lives(self, lives: Mapping[int, HostRecord]) -> None:
        """Know exactly these hosts."""
        there = {(life, record.address) for life, record in lives.items()}
        for life in [one for one, host in self._lives.items() if (one, host.address) not in there]:
            self._lives.pop(life).forget("it is in the directory no more")
            if (channel := self._channels.pop(life, None)) is not None:
                self._closing.start(channel.close())
        for life in lives.keys() - self._lives.keys():
            self._lives[life] = self._met(lives[life])
        self._changed()

    def show_own(self, record: HostRecord) -> None:
        """Show this host among all, at the address that it has entered."""
        self.own = self.own or FleetHost(record.address)
        self.own.name, self.own.is_self, self.own.problem = record.name, True, "this host"

    def _met(self, record: HostRecord) -> FleetHost:
        host = FleetHost(record.address)
        host.epoch, host.name, host.is_streaming = record.epoch, record.name, False
        host.problem = refusal_of(record.protocol, record.oldest)
        host.is_live = not host.problem
        if host.problem:
            log.warning("host %s (%s) is not asked: %s", record.address, record.name, host.problem)
        return host

    def _reach(self, host: FleetHost) -> bool:
        """Give a host its channel; False when that cannot be: certificates are not read."""
        if host.stub is None:
            try:
                channel = self._channels[host.epoch] = open_channel(host.address, self._tls)
            except OSError as failure:
                host.problem = str(failure)
                return False
            host.stub = PeerServiceStub(channel)
        return True

    def directory_answers(self) -> None:
        """Look again, unless looks failed a moment ago."""
        if not self.is_open and self._clock() >= self._closed_until:
            self.is_open, self._is_proven = True, False
            self._changed()

    def _fail(self, problem: str) -> None:
        """Look no more for a while."""
        self.counters["index_failed"] += 1
        if not self.is_open:
            return
        if self._is_proven:
            log.warning("the index is not asked; what other hosts hold is not known: %s", problem)
            self._pause_s = PAUSE_S
        self.is_open = False
        self._closed_until = self._clock() + self._pause_s
        self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)
        self._known = Remembered(MAX_KNOWN)
        self._lost()
        self._changed()

    async def stop(self) -> None:
        """See KnownHosts."""
        self.is_open = False
        await self._looks.stop()
        await asyncio.sleep(0)  # their answers are given
        self.set_lives({})
        await self._closing.settle()

    # --------------------------------------------------------------------------------------- looks

    def find(self, part: ChainPart, answer: Callable[[Held], None]) -> None:
        """See KnownHosts. What a host told of an awaited chain is not asked of the index."""
        if told := self._tellers_of(part):
            answer(told)
            return
        names = part.bundle_names()[:MAX_BUNDLES]
        keys = [bundle_key(part.digest, name[:NAME_BYTES]) for name in names]
        known = self._from_memory(part.tenant, keys) if self.is_open else []
        if known is not None:
            answer(self._held(part, known))
            return
        if (self._looks and not self._is_proven) or not self._shares.take(part.tenant, 1):
            self.counters["index_looks_left_out"] += 1
            answer({})
            return

        def ended(look: asyncio.Task[list[frozenset[int]]]) -> None:
            self._shares.give(part.tenant, 1)
            answer(self._held(part, [] if look.cancelled() else look.result()))

        self._looks.start(self._look(part.tenant, keys)).add_done_callback(ended)

    def _tellers_of(self, part: ChainPart) -> Held:
        """Return the hosts that told of all these blocks."""
        if not self._told or not part.names:
            return {}
        now = self._clock()
        return {
            host: len(part.names)
            for life, host in self._lives.items()
            if host.is_live
            and all(
                (self._told.get(part.tenant, (life, part.digest, name)) or 0.0) > now for name in part.names
            )
        }

    def _from_memory(self, tenant: str, keys: Sequence[bytes]) -> list[frozenset[int]] | None:
        """Return the holders of each bundle, to the first one without any; None: the index is to be asked."""
        found, now = list[frozenset[int]](), self._clock()
        for key in keys:
            lives, until = self._known.get(tenant, key) or (frozenset[int](), 0.0)
            if until <= now:
                return None
            found.append(lives)
            if not lives:
                break
        return found

    async def _look(self, tenant: str, keys: Sequence[bytes]) -> list[frozenset[int]]:
        """Return the holders of each bundle, as far as one host has all before it."""
        found, step = list[frozenset[int]](), FIRST_STEP
        try:
            async with asyncio.timeout(LOOK_S * 2):
                while len(found) < len(keys):
                    asked = keys[len(found) : len(found) + step]
                    answers = await self._index.holders(asked)
                    self.counters["index_looks"] += 1
                    self.counters["index_bundles_asked"] += len(asked)
                    found += self._remember(tenant, asked, answers)
                    if not frozenset.intersection(*found):
                        break
                    step = min(4 * step, MAX_STEP)
            self._is_proven, self._pause_s = True, PAUSE_S
        except (DirectoryError, TimeoutError) as failure:
            self._fail(str(failure) or "no answer in time")
        except Exception as failure:  # of the client: a look is answered all the same
            self._fail(repr(failure)[:200])
        return found

    def _remember(
        self, tenant: str, keys: Sequence[bytes], answers: Sequence[frozenset[int]]
    ) -> list[frozenset[int]]:
        """Remember the holders of bundles for a moment; return the lives among them that are there."""
        now, found = self._clock(), list[frozenset[int]]()
        for key, lives in zip(keys, answers, strict=True):
            lives = lives.intersection(self._lives)
            found.append(lives)
            self._known.put(tenant, key, (lives, now + (PRESENT_S if lives else MISSING_S)))
        return found

    def _held(self, part: ChainPart, found: Sequence[frozenset[int]]) -> Held:
        """Return how many blocks each host holds, when the lives in `found` hold each of the bundles."""
        held = dict[FleetHost, int]()
        for life in found[0] if found else ():
            host = self._lives.get(life)
            if host is not None and host.is_live and self._reach(host):
                count = next((n for n, lives in enumerate(found) if life not in lives), len(found))
                held[host] = count * part.size - part.offset
        return held
