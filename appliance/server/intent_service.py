"""IntentService: the calls of KVCacheService that say what will be needed: pins, prefetches, sessions."""

from ...v1 import kvcache_pb2 as pb
from ..core import events
from ..core.results import CountResult, PinResult, PrefetchResult
from ..errors import error
from ..replies import NowOrLater
from ..security import request_checks as checks
from ..security.callers import Caller
from .cache_service import CacheService
from .responses import respond


class IntentService:
    """Handlers of pins, prefetches and sessions, beside those of `CacheService`."""

    def __init__(self, cache: CacheService) -> None:
        self._cache = cache

    def pin(self, caller: Caller, request: pb.PinRequest) -> NowOrLater[pb.PinResponse]:
        """Keep blocks at or above a floor tier for a time; returns the pin's number."""
        cache = self._cache
        client = cache.client_of(caller, request.client_id)
        hashes = cache.chain(request.prefix_hashes)
        cache.identity_of(caller, request.namespace_id)
        checks.text("request_id", request.request_id)
        floor = checks.tier("floor", request.floor, cache.tiers, cache.ladder.put_tier)
        ttl_s = checks.ttl_s(request.ttl_ms, cache.options.pin_ttl_max_s) or cache.options.lease_ttl_max_s
        answer = cache.appliance.ask(
            lambda call: events.PinRequested(
                call, client.id, request.request_id, request.namespace_id, hashes, floor, ttl_s
            )
        )
        return respond(
            answer,
            PinResult,
            lambda result: pb.PinResponse(pin_id=result.pin_id, num_blocks=result.num_blocks),
        )

    def unpin(self, caller: Caller, request: pb.UnpinRequest) -> pb.UnpinResponse:
        """End a pin of the caller's domain. Idempotent."""
        cache = self._cache
        if cache.planner.pins.domain_of(request.pin_id) == caller.domain:
            cache.appliance.step(events.UnpinRequested(request.pin_id))
        return pb.UnpinResponse()

    def prefetch(self, caller: Caller, request: pb.PrefetchRequest) -> NowOrLater[pb.PrefetchResponse]:
        """Promote blocks into hbm or dram; returns how many are there or under way."""
        cache = self._cache
        client = cache.client_of(caller, request.client_id)
        hashes = cache.chain(request.prefix_hashes)
        if request.namespace_id:
            cache.identity_of(caller, request.namespace_id)
        device_tier, put_tier = cache.ladder.device_tier, cache.ladder.put_tier
        target = checks.tier("target", request.target, cache.tiers, put_tier)
        if target not in (device_tier, put_tier):
            names = f"{device_tier.label} or {put_tier.label}"
            raise error("BAD_REQUEST", f"blocks are prefetched into {names}, not {target.label}")
        deadline_at = cache.deadline(Caller(), request.deadline_ms, float("inf"))
        answer = cache.appliance.ask(
            lambda call: events.PrefetchRequested(
                call, client.id, request.namespace_id, hashes, target, deadline_at
            )
        )
        return respond(
            answer,
            PrefetchResult,
            lambda result: pb.PrefetchResponse(
                num_blocks=result.num_blocks, num_promoted=result.num_promoted
            ),
        )

    def update_session(self, caller: Caller, request: pb.UpdateSessionRequest) -> pb.UpdateSessionResponse:
        """Take over urgency, deadline and progress of a session; returns whether it is new."""
        cache = self._cache
        client = cache.client_of(caller, request.client_id)
        session_id = caller.known_session("session_id", request.session_id)
        deadline_at = cache.deadline(Caller(), request.deadline_ms, float("inf"))
        created = cache.planner.inspection.session(session_id) is None
        back_at = cache.deadline(Caller(), request.back_in_ms, float("inf"))
        urgency = caller.urgency(request.urgency)
        num_decoded = request.num_decoded_tokens
        cache.appliance.step(
            events.SessionUpdated(client.id, session_id, urgency, deadline_at, back_at, num_decoded)
        )
        return pb.UpdateSessionResponse(created=created)

    def fork_session(
        self, caller: Caller, request: pb.ForkSessionRequest
    ) -> NowOrLater[pb.ForkSessionResponse]:
        """Let a new session continue the blocks of an old one; returns their number."""
        cache = self._cache
        client = cache.client_of(caller, request.client_id)
        old = caller.known_session("session_id", request.session_id)
        new = caller.known_session("new_session_id", request.new_session_id)
        answer = cache.appliance.ask(lambda call: events.SessionForked(call, client.id, old, new))
        return respond(answer, CountResult, lambda result: pb.ForkSessionResponse(num_blocks=result.count))

    def end_session(self, caller: Caller, request: pb.EndSessionRequest) -> NowOrLater[pb.EndSessionResponse]:
        """End a session; with `archive` its blocks are demoted. Returns their number."""
        cache = self._cache
        client = cache.client_of(caller, request.client_id)
        session_id = caller.known_session("session_id", request.session_id)
        said = request.archive, request.num_decoded_tokens
        answer = cache.appliance.ask(lambda call: events.SessionEnded(call, client.id, session_id, *said))
        return respond(answer, CountResult, lambda result: pb.EndSessionResponse(num_archived=result.count))
