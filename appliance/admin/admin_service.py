"""Admin: what people and their tools ask, for AdminService. Sees everything, changes little."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from itertools import islice
from typing import Any, NamedTuple, TypeVar

from ... import __version__
from ...v1 import admin_pb2 as pb
from ..core import events
from ..core.results import EvictResult, Refusal
from ..core.worth import reads_to_earn
from ..errors import error, from_refusal
from ..observability.observability import Observability
from ..observability.snapshot import asked
from ..security import request_checks as checks
from ..security.callers import Caller
from ..server.cache_service import CacheService
from ..server.ports import ReloadPort
from .tenant_admin import TenantAdmin
from .verify_service import scrub_status

Found = TypeVar("Found")
MAX_WORTHS = 16  # namespaces of which a status tells what their bundles cost
MIN_PREFIX_BYTES = 4  # of a block's name: enough to be unique, too much to guess a neighbour


class DrainResult(NamedTuple):
    """What a drain did."""

    num_leases_ended: int
    num_blocks_flushed: int
    num_blocks_unflushed: int  # of those that only memory has


class AdminService:
    """Handlers of AdminService.

    `drain` and `restart` are the daemon's: (grace_s, exit) -> DrainResult, and (grace_s). `codec_speeds` are
    those of decoding, in bytes a second, by dtype and codec.
    """

    def __init__(
        self,
        service: CacheService,
        drain: Callable[[float, bool], Awaitable[DrainResult]],
        restart: Callable[[float], Awaitable[None]],
        observability: Observability,
        reload: ReloadPort,
        codec_speeds: Callable[[], Mapping[tuple[str, str], float]],
    ) -> None:
        self._service = service
        self._drain = drain
        self._restart = restart
        self._observability = observability
        self._view = observability.view
        self._reload = reload
        self._codec_speeds = codec_speeds
        self.tenants = TenantAdmin(service.appliance, lambda: reload.loaded.settings.tenants, service.book)

    def get_status(self, caller: Caller, request: pb.GetStatusRequest) -> pb.GetStatusResponse:
        """Return version, tiers, edges, counters, policy, keys and write budget."""
        service, view = self._service, self._view
        statistics = service.planner.statistics()
        engines = service.appliance.engines
        source = view.source_status()
        if source is not None:
            source["bundles"] = self._bundle_worths()
        shown: dict[str, Any] = {  # as fields of their messages
            "writes": view.writes(),
            "source": source,
            "hosts": view.hosts(),
            "directory": view.directory_status(),
        }
        return pb.GetStatusResponse(
            version=__version__,
            epoch=service.facts.epoch,
            uptime_s=view.uptime_s(),
            draining=service.draining,
            tiers=[
                pb.TierStatus(
                    tier=service.tiers.number(tier),
                    backend=engines[tier].statistics().backend,
                    is_offline=tier in service.planner.core.offline,
                    **numbers,
                )
                for tier, numbers in statistics["tiers"].items()
            ],
            edges=[
                pb.EdgeStatus(
                    source=edge.source,
                    target=edge.target,
                    num_copies=edge.num_copies,
                    num_failed=edge.num_failed,
                    num_in_flight=edge.num_in_flight,
                    num_queued=edge.num_queued,
                    bytes=edge.num_bytes,
                    bandwidth_bytes_per_s=edge.bandwidth_bytes_per_s,
                    latency_s=edge.latency_s,
                )
                for edge in view.edges()
            ],
            num_blocks=statistics["num_blocks"],
            num_sessions=statistics["num_sessions"],
            num_leases=statistics["num_leases"],
            num_clients=len(service.clients),
            num_namespaces=statistics["num_namespaces"],
            counters={**statistics["counters"], **view.counters()},
            policy=self._policy_status(),
            encryption=self._encryption_status(),
            codec_speeds=[
                pb.CodecSpeed(codec=name, dtype=dtype, decode_bytes_per_s=speed)
                for (dtype, name), speed in sorted(self._codec_speeds().items())
            ],
            **shown,
            ladder=service.tiers.announcement(),
            scrubs=[scrub_status(one, service.appliance.clock()) for one in view.scrubs.values()],
        )

    def _bundle_worths(self) -> list[pb.BundleWorth]:
        """Return what bundles cost to fetch and to compute, of the first namespaces."""
        planner, found = self._service.planner, []
        prices = planner.core.options.prices
        for namespace in islice(planner.catalog.namespaces.values(), MAX_WORTHS):
            if (seconds := planner.fetches.bundle_seconds(namespace)) is not None:
                num_bytes = planner.source_index.num_blocks(namespace) * namespace.block_bytes
                reads = reads_to_earn(prices, num_bytes, seconds[1])
                found.append(
                    pb.BundleWorth(
                        namespace_id=namespace.id,
                        fetch_s=seconds[0],
                        recompute_s=seconds[1],
                        reads_to_earn=reads,
                        namespace=namespace.identity.digest.hex(),
                        share=planner.core.options.share_of(namespace.identity),
                    )
                )
        return found

    def get_policy(self, caller: Caller, request: pb.GetPolicyRequest) -> pb.GetPolicyResponse:
        """Return the status of the policy in force and the value and source of each setting."""
        rows = self._reload.loaded.rows()
        values = [
            pb.PolicyValue(key=key, json=json.dumps(value), source=source) for key, value, source in rows
        ]
        return pb.GetPolicyResponse(status=self._policy_status(), values=values)

    async def apply_policy(self, caller: Caller, request: pb.ApplyPolicyRequest) -> pb.ApplyPolicyResponse:
        """Replace the policy, or with `dry_run` only return the changes. Raises ApplianceError."""
        text = request.yaml if request.HasField("yaml") else None
        applied = await self._reload.apply(
            text, request.name, is_dry_run=request.dry_run, generation=request.generation
        )
        changes = [
            pb.PolicyChange(key=c.key, was=json.dumps(c.was), becomes=json.dumps(c.becomes))
            for c in applied.changes
        ]
        return pb.ApplyPolicyResponse(generation=applied.generation, changes=changes)

    def _policy_status(self) -> pb.PolicyStatus:
        status, now = self._reload.status, self._service.appliance.clock()
        return pb.PolicyStatus(
            generation=status.generation,
            path=str(self._reload.origin.path or ""),
            applied_s_ago=now - status.applied_at,
            num_applied=status.num_applied,
            num_refused=status.num_refused,
            last_error=status.last_error,
            refused_s_ago=now - status.refused_at if status.last_error else 0.0,
        )

    def _encryption_status(self) -> pb.EncryptionStatus | None:
        rotation = self._reload.rotation
        if rotation is None:
            return None
        keys = [
            pb.MasterKeyStatus(id=use.id, is_current=use.is_current, num_wrapped=use.num_wrapped)
            for use in rotation.uses()
        ]
        return pb.EncryptionStatus(master_keys=keys, last_error=rotation.last_error)

    def inspect(self, caller: Caller, request: pb.InspectRequest) -> pb.InspectResponse:
        """Return everything known about a block, session, lease, segment or namespace, as JSON."""
        inspection = self._service.planner.inspection
        what = request.WhichOneof("what")
        found: Any
        if what == "block":
            found = inspection.block(request.block.namespace_id, _name(request.block))
        elif what == "session_id":
            found = inspection.session(request.session_id)
            if found is not None:
                found |= asked(self._view.telemetry.of(request.session_id))
        elif what == "lease_id":
            found = inspection.lease(request.lease_id)
        elif what == "segment":
            found = inspection.segment(request.segment)
        elif what == "namespace_id":
            found = inspection.namespaces(request.namespace_id)
        else:
            raise error("BAD_REQUEST", "name a block, a session, a lease, a segment or a namespace")
        if found is None:
            name = request.block.prefix_hash.hex() if what == "block" else getattr(request, what)
            raise error("NOTHING_THERE", f"there is no {what.removesuffix('_id')} {name}")
        return pb.InspectResponse(json=json.dumps(found, sort_keys=True))

    def get_story(self, caller: Caller, request: pb.GetStoryRequest) -> pb.GetStoryResponse:
        """Return what happened to a block or session, oldest first."""
        planner = self._service.planner
        lines = _remembered(request, planner.inspection.story, planner.story.of)
        since = self._view.started_at
        return pb.GetStoryResponse(
            lines=[pb.StoryLine(at_s=line.at - since, what=line.what, why=line.why) for line in lines],
            uptime_s=self._view.uptime_s(),
        )

    def explain(self, caller: Caller, request: pb.ExplainRequest) -> pb.ExplainResponse:
        """Return where the blocks of a name or session are, and why others left."""
        why = self._observability.why
        found = _remembered(request, why.block, why.session)
        return found.message(self._view.started_at, self._view.clock())

    def get_snapshot(self, caller: Caller, request: pb.GetSnapshotRequest) -> pb.GetSnapshotResponse:
        """Return the state of the appliance, names included, as JSON."""
        snapshot = self._observability.snapshots.take(request.num_samples, with_names=True)
        return pb.GetSnapshotResponse(json=json.dumps(snapshot))

    async def evict(self, caller: Caller, request: pb.EvictRequest) -> pb.EvictResponse:
        """Evict blocks from a tier; returns how many left, and how many stay and why."""
        tier = checks.tier("tier", request.tier, self._service.tiers)
        if tier not in self._service.appliance.engines:
            tiers = ", ".join(one.label for one in sorted(self._service.appliance.engines))
            raise error("BAD_TIER", f"this daemon has no tier {tier.label}; it has {tiers}")
        if request.bytes and request.namespace_id:
            raise error("BAD_REQUEST", "name a namespace or a number of bytes, not both")
        wanted = (tier, request.bytes, request.namespace_id)
        answer = self._service.appliance.ask(lambda call: events.EvictRequested(call, *wanted))
        result = await answer if isinstance(answer, asyncio.Future) else answer
        if isinstance(result, Refusal):
            raise from_refusal(result)
        assert isinstance(result, EvictResult)
        return pb.EvictResponse(
            num_blocks=result.num_blocks,
            bytes=result.num_bytes,
            num_readable=result.num_readable,
            num_kept=result.num_kept,
        )

    async def drain(self, caller: Caller, request: pb.DrainRequest) -> pb.DrainResponse:
        """Accept nothing new, flush and seal; with `exit` the process ends.

        With `restart` it ends for another one, and flushes nothing. Raises ApplianceError.
        """
        if request.restart:
            await self._restart(request.grace_ms / 1000)
            return pb.DrainResponse()
        drained = await self._drain(request.grace_ms / 1000, request.exit)
        return pb.DrainResponse(**drained._asdict())

    def list_tenants(self, caller: Caller, request: pb.ListTenantsRequest) -> pb.ListTenantsResponse:
        """Return each tenant with what it moved and keeps."""
        return self.tenants.list()

    async def erase_tenant(self, caller: Caller, request: pb.EraseTenantRequest) -> pb.EraseTenantResponse:
        """Make everything unreadable that a tenant stored. Raises ApplianceError."""
        return await self.tenants.erase(request.name)

    def check_integrity(self, caller: Caller, request: pb.CheckIntegrityRequest) -> pb.CheckIntegrityResponse:
        """Return what is wrong in the planner's and the shell's bookkeeping; empty when nothing is."""
        service = self._service
        problems = [*service.planner.check_integrity(), *service.check_integrity()]
        return pb.CheckIntegrityResponse(problems=problems)


def _remembered(
    request: pb.GetStoryRequest | pb.ExplainRequest,
    of_block: Callable[[int, bytes], Found | None],
    of_session: Callable[[str], Found | None],
) -> Found:
    """Return what is remembered about the block or session of a request. Raises ApplianceError."""
    match request.WhichOneof("what"):
        case "block":
            found = of_block(request.block.namespace_id, _name(request.block))
        case "session_id":
            found = of_session(request.session_id)
        case _:
            raise error("BAD_REQUEST", "name a block or a session")
    if not found:
        noun = "block" if request.HasField("block") else "session"
        raise error("NOTHING_THERE", f"nothing is remembered about this {noun}")
    return found


def _name(block: pb.BlockName) -> bytes:
    if len(block.prefix_hash) < MIN_PREFIX_BYTES:
        raise error("BAD_KEY", f"give at least {MIN_PREFIX_BYTES} bytes of the prefix hash")
    return block.prefix_hash
