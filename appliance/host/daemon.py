"""The daemon: one process, from settings to the last sealed segment.

    assemble tiers -> adopt what the cold store recovered -> serve -> (signal) drain -> stop

Draining keeps an order that loses nothing: report NOT_SERVING, take nothing new, write what is dirty to the
cold store, seal it, export bundles, then close connections and end. A second signal skips the waiting.
"""

import asyncio
import contextlib
import logging
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path

from ...tiers.block import Tier
from ...tiers.gpu.device.contract import Device
from ...tiers.memory.keeper import Keeper
from ...v1.addresses import socket_path
from ..admin.admin_service import AdminService, DrainResult
from ..admin.verify_service import VerifyService
from ..config import Loaded, Settings, bandwidth_shares_of
from ..core.events import ColdEdgeOpened, DrainStarted
from ..detached import detached
from ..errors import StartError, error
from ..event_log import MAX_BLOCK_EVENTS, EventLog
from ..fleet.tickets import PeerService
from ..gpu.page_service import DirectDevice, DirectPath
from ..observability.census import only_in_memory
from ..observability.daemon_view import DRAINING, READY, DaemonView
from ..observability.observability import Observability
from ..persisted.learned_file import LearnedFile
from ..persisted.writes_file import WritesFile
from ..preflight.certificates import gather_tls
from ..security.callers import CallRates
from ..security.client_registry import ClientRegistry
from ..security.principals import Authenticator
from ..server.access_log import MAX_WAITING_ACCESSES, AccessLog
from ..server.cache_service import CacheService, ServerFacts
from ..server.grpc_server import EventsService, GrpcServer
from ..server.listeners import Listeners
from ..server.local_server import LocalServer
from ..server.streams import MAX_STREAM_PUT_BYTES, PutBuffers
from ..tasks import Tasks
from . import wiring
from .adoption import Adoption
from .assembly import Assembly, begin
from .policy_watch import watch
from .reload import Reload, check_successor

log = logging.getLogger(__name__)

CLOSE_GRACE_S = 1.0  # for calls in progress when everything else is done
SWEEP_INTERVAL_S = 5.0


class Daemon:
    """The running daemon: planner, tiers, transports. Made by `Daemon.start`; ended by `stop`."""

    def __init__(self, loaded: Loaded, assembly: Assembly) -> None:
        """Wire the parts; nothing is served yet. Must run on the event loop."""
        settings, epoch = loaded.settings, assembly.epoch
        self.settings = settings
        self.assembly = assembly
        self.planner = wiring.build_planner(settings, assembly)
        self.events = EventLog(MAX_BLOCK_EVENTS, self.planner.catalog.namespaces)
        self.appliance = wiring.build_appliance(settings, self.planner, assembly, self.events)
        self.accesses = AccessLog(self.appliance, self.planner, MAX_WAITING_ACCESSES)
        if assembly.hot is not None:
            soon, lose = asyncio.get_running_loop().call_soon_threadsafe, self.appliance.lose_tier
            assembly.hot.engine.on_lost = lambda reason: soon(lose, Tier.HBM, reason)
        if assembly.book is not None:
            self.planner.name_namespaces(assembly.book.identities)
        self._recall(assembly.learned)
        self.learned = LearnedFile(wiring.cold_path(settings), self._what_was_learned)
        budget = self.planner.write_budget
        self.writes = WritesFile(wiring.cold_path(settings), budget, self.appliance.clock, time.time)
        self.writes.restore(assembly.written)
        if assembly.recovered is not None:
            self.planner.adopt(assembly.recovered, self.appliance.clock())
            assembly.recovered = None  # a column per fragment: hundreds of megabytes in a large store
        if assembly.book is not None:
            assembly.book.present = self.planner.identities
            for number, identity in self.planner.identities().items():
                assembly.book.note(number, identity)
        self.reload = Reload(loaded, self.appliance, assembly.prefault)
        self.reload.parts.append(self._adopt)
        self.reload.profiles = assembly.profiles
        self.source, self.fleet = wiring.build_sources(settings, self.appliance, assembly, epoch)
        stores = settings, self.appliance, assembly, self.source
        self.rotation = self.reload.rotation = wiring.build_rotation(*stores)
        self.codec_selection = wiring.build_codec_selection(*stores)
        self.scrubber = wiring.build_scrubber(self.appliance, assembly)
        self._wire_services(settings, epoch)
        self.leaving = asyncio.Event()
        self._drain_began: tuple[int, int] | None = None  # leases then, blocks ever stored in the cold store
        self._sweeper: asyncio.TimerHandle | None = None
        self._prefaulting: asyncio.Task[None] | None = None
        self._watching: Tasks[None] = Tasks()
        self._beside: Tasks[None] = Tasks()  # adoption of memory, choice of codecs
        self.adoption = Adoption(self.appliance, assembly)
        self.service.verify_found = self.adoption.verify

    def _wire_services(self, settings: Settings, epoch: int) -> None:
        """Build what serves: authentication, the two transports, and what reads the daemon."""
        self.clients = ClientRegistry(
            self.appliance, settings.limits.max_clients, settings.planner_options().num_tenants
        )
        self.access = Authenticator(settings.access, settings.tenants, host_name=settings.peers.host_name)
        self.rates = CallRates(settings.tenants)
        self.put_buffers = PutBuffers(MAX_STREAM_PUT_BYTES)
        path, extent_bytes = wiring.local_path(settings), settings.tiers.dram.extent_bytes
        self.service = CacheService(
            self.appliance,
            self.clients,
            settings.planner_options(),
            ServerFacts(epoch, extent_bytes, str(path or "")),
            self.assembly.staging_routes(self.put_buffers),
        )
        self.service.profiles, self.service.book = self.assembly.profiles, self.assembly.book
        self.service.compression = settings.compression
        self.local: LocalServer | None = None
        is_encrypted = settings.encryption.master_key is not None
        self.peers = PeerService(self.service, self.events, settings.peers.send_limit_bytes, is_encrypted)
        more = (self.put_buffers, self.access)
        self._more, self._rank_path = wiring.build_handlers(self.service, self.peers, self.fleet, *more)
        if path is not None:
            routes, options = self.assembly.staging_routes, wiring.local_options(settings)
            self.local = LocalServer(self.service, path, routes, options, self.access, self.rates, self._more)
        self.direct: DirectPath | None = None  # while there is a device
        self._wire_observability(settings)
        self.listeners = Listeners(settings.listen, self.access, settings.access.tls, settings.socket_mode)
        self.grpc = GrpcServer(
            self._handlers(),
            self.listeners,
            self.rates,
            self.service.call_latencies,
            self.appliance.clock,
            with_reflection=settings.reflection,
        )

    def _wire_observability(self, settings: Settings) -> None:
        """Build what reads the daemon, and let it report changes of state."""
        view = DaemonView(
            self.service,
            self.events,
            lambda: self.planner.core.choice,
            self.counters,
            lambda: self.reload.status,
        )
        view.rotation, view.scrubs = self.rotation, self.scrubber.tiers
        view.source, view.fleet = self.source, self.fleet
        view.state_listeners.append(self._report)
        self.reports: Tasks[None] = Tasks()  # until gRPC's health says what was last noticed
        self.observability = Observability(view, settings.observe, self.access, self._rank_path)

    def _handlers(self) -> Mapping[str, Sequence[object]]:
        """Return the objects that answer the calls of each gRPC service."""
        admin = AdminService(
            self.service,
            self.drain,
            self.restart,
            self.observability,
            self.reload,
            lambda: self.codec_selection.speeds if self.codec_selection else {},
        )
        admin.tenants.source = self.source
        return {
            "KVCacheService": (self.service, *self._more),
            "AdminService": (admin, VerifyService(self.scrubber, self.appliance.clock)),
            "EventsService": (EventsService(self.events, self.accesses, self.service),),
            "PeerService": (self.peers,),
        }

    @classmethod
    async def start(
        cls,
        source: Settings | Loaded,
        device: Device | None = None,
        peers: Sequence[Device] = (),
        keeper: Keeper | None = None,
    ) -> "Daemon":
        """Assemble, recover, listen.

        Raises StartError, naming what to change. With a `device`, hbm is in its memory, and runtimes on
        `peers` are served, too. With a `keeper`, memory tiers outlive the process.
        """
        loaded = Loaded(source) if isinstance(source, Settings) else source
        return await cls.serve(loaded, begin(loaded.settings, device, peers, keeper))

    @classmethod
    async def serve(cls, loaded: Loaded, assembling: "Future[Assembly]") -> "Daemon":
        """Listen, with the tiers that are being assembled. Raises StartError.

        Settings that say where they are from are read again when that changes."""
        assembly = await asyncio.wrap_future(assembling)
        settings = loaded.settings
        daemon = cls(loaded, assembly)
        try:
            for address in settings.listen:
                wiring.make_folder(socket_path(address), is_shared=bool(settings.tenants))
            await daemon.observability.start()
            await daemon.grpc.start()
            if daemon.fleet is not None:
                daemon.fleet.start(daemon.peers)
            if assembly.hot is not None:
                daemon.serve_pages(assembly.hot.direct)
            if daemon.local is not None:
                daemon.local.start()  # last: a client that connects here finds everything there
        except StartError:
            await daemon.stop()
            raise
        daemon._beside.start(daemon.adoption.run())
        daemon._prefaulting = asyncio.create_task(daemon._prefault())
        if daemon.codec_selection is not None:
            daemon._beside.start(daemon.codec_selection.run())
        daemon.scrubber.start()
        if daemon.source is not None:
            daemon.source.start()
        daemon._watch_files()
        daemon._sweep()
        daemon.learned.begin()
        daemon.writes.begin()
        return daemon

    def _watch_files(self) -> None:
        """Read the administrator's files again when they change."""
        tokens, certificates = self.access.tokens, self.listeners.certificates

        def watch_one(changed: Callable[[], Awaitable[object]], *paths: Path | None) -> None:
            if present := [path for path in paths if path is not None]:
                self._watching.start(watch(present, changed))

        async def use_tokens() -> None:
            assert tokens is not None
            if await detached(tokens.read_again):
                self.grpc.end_revoked()
                self.observability.end_revoked()

        async def use_certificates() -> None:
            assert certificates is not None
            await detached(certificates.read_again)
            with contextlib.suppress(OSError, ValueError):  # one is just being written: it changes again
                if (read := await detached(lambda: gather_tls(certificates.files))) is not None:
                    self.observability.view.tls_ends |= read.ends

        watch_one(self.reload.file_changed, self.reload.origin.path)
        if self.rotation is not None:
            watch_one(self.rotation.file_changed, self.settings.encryption.master_key)
        if tokens is not None:
            watch_one(use_tokens, tokens.path)
        if certificates is not None:
            files = certificates.files
            watch_one(use_certificates, files.certificate, files.key, files.client_ca)

    def serve_pages(self, devices: list[DirectDevice]) -> None:
        """Let runtimes register pages on these devices. Local clients only."""
        if self.local is not None:
            self.direct = DirectPath(self.service, devices, self.assembly.memory_threads)
            self.local.serve_pages(self.direct)

    async def drain(self, grace_s: float, leave: bool = False) -> DrainResult:
        """Refuse new work, flush what is dirty, seal; with `leave` end the process. Idempotent.
        Returns the leases when it began, the blocks that the cold store took since, and those that it has
        not; 0 without one."""
        if not self.service.draining:
            log.info("draining: nothing new is taken, within %g s what only memory holds is written", grace_s)
            self.service.draining = True
            await self.grpc.stop_serving()
        if is_first := self._drain_began is None:
            self._drain_began = self.planner.statistics()["num_leases"], self._num_stored()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                if is_first:
                    answer = self.appliance.ask(DrainStarted)
                    if isinstance(answer, asyncio.Future):
                        await asyncio.shield(answer)
                await self.appliance.settled()
                while to_seal := self.planner.close_cold_store():  # reclaiming may go on meanwhile
                    self.appliance.execute(to_seal)
                    await self.appliance.settled()
                await self.learned.keep()
                await self.writes.keep()
                while self.source is not None and self.planner.exports.num_pending:
                    await self.source.export_ended()
                    await self.appliance.settled()
        self.appliance.execute(self.planner.close_cold_store())  # when time ran out: what can be sealed
        if num_pending := self.planner.exports.num_pending:
            log.warning("draining: %d bundles were not exported in time", num_pending)
        if leave:
            self.leaving.set()
        assert self._drain_began is not None
        num_leases, num_stored = self._drain_began
        num_unflushed = 0 if self.assembly.store is None else only_in_memory(self.planner.catalog)[0]
        if num_unflushed:
            log.warning("draining: %d blocks are only in memory still, and end with it", num_unflushed)
        return DrainResult(num_leases, self._num_stored() - num_stored, num_unflushed)

    def _num_stored(self) -> int:
        """Return how often a block came to be whole in the cold store since the start."""
        core = self.planner.core
        return core.story.counters.get(core.stored_in[core.ladder.log_tier], 0)

    async def restart(self, grace_s: float) -> None:
        """Make room for another daemon, which takes over what memory holds. Raises ApplianceError."""
        keeper = self.assembly.keeper
        if keeper is None:
            raise error(
                "BAD_REQUEST", "this daemon has no supervisor; end it, and start it with `kvtier serve`"
            )
        await asyncio.to_thread(check_successor, *self.reload.held_bytes())
        log.info("making room for another daemon: nothing new is taken, memory stays")
        self.service.draining = keeper.is_handing_over = True
        await self.grpc.stop_serving()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self.appliance.settled()
        self.leaving.set()

    async def stop(self) -> None:
        """Close every connection, then every tier. Idempotent."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        await self._beside.stop()
        await self.adoption.stop()
        self._watching.cancel()
        self.assembly.end_prefault()  # which takes seconds per gigabyte, and `close` waits for it
        await self.reload.close()
        await self.observability.stop()
        await self.reports.settle()
        self.events.close()
        self.accesses.close()
        await self.grpc.stop(CLOSE_GRACE_S)
        if self.local is not None:
            await self.local.stop()
        if self.direct is not None:
            await self.direct.close()  # before its leases end: a device may be reading
        await self.scrubber.stop()
        for source in (self.fleet, self.source):
            if source is not None:
                await source.stop()
        for client in self.clients:
            self.clients.close(client.id, "daemon stops")
        await self.learned.close()  # while the directory is still ours
        await self.writes.close()
        await self.appliance.stop()
        await asyncio.to_thread(self.assembly.close)
        if self._prefaulting is not None:
            await self._prefaulting

    def counters(self) -> Counter[str]:
        """Return what the shell counted, by name."""
        counters = self.appliance.counters + self.learned.counters + self.writes.counters
        counters["policies_applied"] = self.reload.status.num_applied
        counters["policies_refused"] = self.reload.status.num_refused
        if self.direct is not None:
            counters += self.direct.counters
        if self.source is not None:
            counters.update({f"object_{name}": count for name, count in self.source.counters.items()})
        if self.fleet is not None:
            counters.update({f"peer_{name}": count for name, count in self.fleet.counters.items()})
        hot = self.assembly.hot
        for name, number in (hot.cold.counters if hot is not None and hot.cold is not None else {}).items():
            counters[f"nvme_to_hbm_{name}"] += number
        for reason, number in (self.local.counters if self.local is not None else Counter[str]()).items():
            counters[f"local_closed_{reason.replace(' ', '_')}"] += number
        counters.update({f"grpc_{name}": number for name, number in self.listeners.counters.items()})
        return counters

    def check_integrity(self) -> list[str]:
        """Audit planner and shell."""
        return [
            *self.planner.check_integrity(),
            *self.service.check_integrity(),
            *self.observability.view.telemetry.check_integrity(),
            *(self.direct.check_integrity() if self.direct is not None else []),
        ]

    def _adopt(self, settings: Settings) -> None:
        """Apply another policy to the shell's parts."""
        self._adopt_profiles()
        self.settings = settings
        self.service.options = settings.planner_options()
        self.service.compression = settings.compression
        self.clients.limit(settings.limits.max_clients, self.service.options.num_tenants)
        if self.codec_selection is not None:
            self.codec_selection.adopt(settings.compression)
        self.access.adopt(settings.tenants)
        self.rates.adopt(settings.tenants)
        self.observability.adopt(settings.observe)
        self.appliance.mover.shares.adopt(bandwidth_shares_of(settings.tenants))
        self.grpc.end_revoked()
        self.listeners.set_mode(settings.socket_mode)
        if self.local is not None:
            self.local.adopt(wiring.local_options(settings))
            with contextlib.suppress(OSError):  # its file is gone
                os.chmod(self.local.path, settings.socket_mode)

    def _report(self, state: str) -> None:
        """Set gRPC's health to what /readyz says."""
        if state not in (READY, DRAINING):
            log.error("not ready: %s %s", state, ", ".join(self.observability.view.health.stalled))
        self.reports.start(self.grpc.report(state == READY))

    def _adopt_profiles(self) -> None:
        """Use the profiles that the reload has read."""
        self.service.profiles = profiles = self.reload.profiles
        if self.assembly.store is not None:
            self.assembly.store.codecs.adopt(profiles)

    def _recall(self, learned: bytes) -> None:
        """Restore what the policies knew before the restart."""
        for name, why in (self.planner.recall(learned) if learned else {}).items():
            log.warning("what the policies learned before is ignored (%s): %s", name, why)

    def _what_was_learned(self) -> bytes:
        """Return what to keep: nothing of a planner that failed, or the next one might fail of it, too."""
        return b"" if self.appliance.failed.done() else self.planner.learned()

    async def _prefault(self) -> None:
        """Allocate the tiers' memory, and start with the measured speed of links."""
        await self.adoption.is_verified.wait()  # it needs the processors more, and has made most pages then
        await asyncio.to_thread(self.assembly.prefault)
        for edge, speed in self.assembly.link_speeds.items():
            mover, now = self.appliance.mover, self.appliance.clock()
            mover.assume(edge, speed.bandwidth_bytes_per_s, speed.latency_s, now)
        if self.assembly.straight_codecs:
            self.appliance.step(ColdEdgeOpened(self.assembly.straight_codecs))

    def _sweep(self) -> None:
        """Forget remote clients that fell silent. What they held went with their ttl, in the planner."""
        self.clients.expire()
        self._sweeper = asyncio.get_running_loop().call_later(SWEEP_INTERVAL_S, self._sweep)
