"""Builds the parts of a daemon from its settings and its assembled tiers, for `Daemon`."""

import logging
import os
import secrets
from functools import partial
from pathlib import Path

from ...sources.objects.fleet_keys import FleetKeys
from ...sources.objects.opening import open_store
from ...tiers.codecs.records import RecordCodecs
from ...tiers.cold.engine import ColdStore
from ...tiers.memory.engine import ExtentEngine
from ...v1.addresses import socket_path
from ..appliance import Appliance
from ..compression.codec_choice import CodecSelection
from ..config import Settings, bandwidth_shares_of
from ..core.instructions import AwaitBlocks, ExportBundle, FetchBundle, SearchBundles, StopAwaiting
from ..core.planner import Planner
from ..errors import StartError
from ..event_log import EventLog
from ..fleet.fleet import Fleet
from ..fleet.rank_service import RankService
from ..fleet.tickets import PeerService
from ..observability.rank_path import RankPath
from ..scrubber import Scrubber
from ..security.key_rotation import KeyRotation
from ..security.principals import Authenticator
from ..server.cache_service import CacheService
from ..server.intent_service import IntentService
from ..server.local_server import LocalOptions
from ..server.streams import ByteStreams, PutBuffers
from ..transfer.fair_queue import BandwidthShares
from ..transfer.object_edge import LIMITS, ObjectEdge
from .assembly import MAX_COPIES_PER_EDGE, Assembly

log = logging.getLogger(__name__)

LOCAL_SUFFIX = ".local"  # the local channel's socket stands beside the gRPC one
SPARE_CONNECTIONS = 32


def build_planner(settings: Settings, assembly: Assembly) -> Planner:
    """Return a planner over the assembly's rooms. Raises StartError for policies that cannot be built."""
    try:
        return Planner(
            settings.planner_options(),
            assembly.rooms,
            policies=settings.policy.choice(),
            ladder=assembly.ladder,
            secret=secrets.token_bytes(32),
            on_policy_failed=partial(log.error, "%s; %s"),
        )
    except ValueError as problem:  # as build in policies/registry.py says
        raise StartError(f"policy: {problem}") from problem


def build_appliance(settings: Settings, planner: Planner, assembly: Assembly, events: EventLog) -> Appliance:
    """Return the appliance that drives `planner` over the assembly's tiers, with the tenants' shares."""
    shares = BandwidthShares(lambda number: planner.catalog.namespaces[number].identity.domain)
    shares.adopt(bandwidth_shares_of(settings.tenants))
    return Appliance(planner, assembly.backends, events, shares=shares)


def build_scrubber(appliance: Appliance, assembly: Assembly) -> Scrubber:
    """Return what verifies the tiers of the host in the background; a device's memory is not read."""
    engines = assembly.engines.items()
    is_read = (ExtentEngine, ColdStore)
    return Scrubber(appliance, {tier: one.verifier for tier, one in engines if isinstance(one, is_read)})


def build_rotation(
    settings: Settings, appliance: Appliance, assembly: Assembly, source: ObjectEdge | None
) -> KeyRotation | None:
    """Return what rotates master keys; None where nothing stored is encrypted."""
    if assembly.master_keys is None or (assembly.store is None and source is None):
        return None
    return KeyRotation(appliance, assembly.store, source, settings.encryption, assembly.master_keys)


def build_codec_selection(
    settings: Settings, appliance: Appliance, assembly: Assembly, source: ObjectEdge | None
) -> CodecSelection | None:
    """Return what measures codecs, for a fleet too, and chooses the cold store's; None without both."""
    if assembly.store is None and not settings.peers.is_on:
        return None
    namespaces = appliance.planner.catalog.namespaces
    selection = CodecSelection(
        settings.compression,
        appliance,
        assembly.store.codecs if assembly.store is not None else RecordCodecs({}),
        lambda: {namespace.identity.geometry.dtype for namespace in namespaces.values()},
        appliance.mover.statistics,
        min(os.cpu_count() or 1, MAX_COPIES_PER_EDGE),
    )
    if source is not None:
        source.codecs = selection.export_codecs
    return selection


def build_sources(
    settings: Settings, appliance: Appliance, assembly: Assembly, epoch: int
) -> tuple[ObjectEdge | None, Fleet | None]:
    """Return what asks the object store, and what asks other hosts; None where there is none."""
    memories = {tier: one for tier, one in assembly.engines.items() if isinstance(one, ExtentEngine)}
    fleet = Fleet(settings, appliance, memories, epoch) if settings.peers.is_on else None
    url, store = settings.object.url, None
    if url:
        opened = partial(open_store, url, limits=LIMITS)
        keys = FleetKeys(assembly.master_keys) if assembly.master_keys is not None else None
        deliver = fleet.edge.deliver_of_store if fleet is not None else appliance.step
        store = ObjectEdge(url, opened, memories, deliver, clock=appliance.clock, keys=keys)
    if fleet is not None:
        fleet.edge.store = store
    if (edge := fleet.edge if fleet is not None else store) is not None:
        appliance.carry_out_by(dict.fromkeys((SearchBundles, FetchBundle, ExportBundle), edge.execute))
    if fleet is not None:
        appliance.carry_out_by(dict.fromkeys((AwaitBlocks, StopAwaiting), fleet.awaits.execute))
    return store, fleet


def build_handlers(
    service: CacheService,
    peers: PeerService,
    fleet: Fleet | None,
    buffers: PutBuffers,
    access: Authenticator,
) -> tuple[tuple[object, ...], RankPath]:
    """Return what answers the calls of KVCacheService that `service` does not, and Rank over HTTP."""
    ranks = RankService(service, peers, fleet)
    if fleet is not None:
        service.locate = fleet.locate
    others = (IntentService(service), ranks, ByteStreams(service, buffers))
    return others, RankPath(ranks, service, access)


def cold_path(settings: Settings) -> Path | None:
    """Return the directory of the cold store; None without one."""
    return settings.tiers.nvme.path if settings.tiers.nvme is not None else None


def local_path(settings: Settings) -> Path | None:
    """Return the path of the local channel's socket; None where gRPC listens at no Unix socket."""
    paths = [path for path in map(socket_path, settings.listen) if path is not None]
    return Path(f"{paths[0]}{LOCAL_SUFFIX}") if paths else None


def local_options(settings: Settings) -> LocalOptions:
    """Return the bounds of the local channel."""
    limits = settings.limits
    # Those beyond `max_clients` attach, and are refused with words.
    max_connections = limits.max_clients + SPARE_CONNECTIONS
    return LocalOptions(limits.staging_per_client_bytes, max_connections, settings.socket_mode)


def make_folder(path: Path | None, *, is_shared: bool) -> None:
    """Create the folder of a socket where it is missing: for this user alone, unless it is for tenants."""
    if path is None:
        return
    try:
        path.parent.mkdir(mode=0o755 if is_shared else 0o700, parents=True, exist_ok=True)
    except OSError as problem:
        raise StartError(f"cannot create {path.parent}: {problem.strerror}; change `listen`") from problem
