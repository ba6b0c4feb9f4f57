"""Requests that say where blocks are to be: prefetch and pin."""

from ....policies.base import Expected
from ....tiers.block import Urgency, tenant_of
from ..catalog.catalog import NamespaceEntry
from ..catalog.core_state import CoreState
from ..events import PinRequested, PrefetchRequested
from ..promotion.loads import Loads
from ..promotion.prefetch import Prefetches
from ..results import PinResult, PrefetchResult
from .acquire_job import stored_prefix
from .pins import PinEntry, Pins
from .request_registry import RequestRegistry


class PlacementRequests:
    """Answers the requests that bring blocks up without reading them."""

    def __init__(
        self, core: CoreState, requests: RequestRegistry, loads: Loads, pins: Pins, prefetching: Prefetches
    ) -> None:
        self._core = core
        self._requests = requests
        self._loads = loads
        self._pins = pins
        self._prefetching = prefetching

    def prefetch(self, event: PrefetchRequested) -> None:
        """Promote a stored prefix for no session; without a namespace in all of the client's domain.

        The limit of blocks per request is then divided among the namespaces that have the first one."""
        namespaces = self._namespaces_of(event)
        if namespaces is None:
            return
        names = event.prefix_hashes[: self._core.options.max_blocks_per_request // (len(namespaces) or 1)]
        chains = [stored_prefix(self._core, one, names) for one in namespaces]
        promoted = sum(self._bring(event, rows) for rows in chains)
        self._core.story.count("blocks_prefetched", promoted)
        self._requests.reply(event.call, PrefetchResult(max(map(len, chains), default=0), promoted))

    def _namespaces_of(self, event: PrefetchRequested) -> list[NamespaceEntry] | None:
        """Return where a prefetch looks; None when it was refused."""
        client = self._requests.client(event.client)
        if event.namespace_id or client is None:
            checked = self._requests.check(event.call, event.client, event.namespace_id, event.prefix_hashes)
            return None if checked is None else [checked[1]]
        first = event.prefix_hashes[0] if event.prefix_hashes else b""
        namespaces = self._core.catalog.namespaces.values()
        return [one for one in namespaces if first in one.rows and one.identity.domain == client.domain]

    def _bring(self, event: PrefetchRequested, rows: list[int]) -> int:
        device_tier = self._core.ladder.device_tier
        if event.target == device_tier and device_tier in self._core.rooms:
            promoted = sum(
                self._loads.promote(row, device_tier, Urgency.WAITING, event.deadline_at) for row in rows
            )
            self._loads.start(Urgency.WAITING, event.deadline_at)
            return promoted
        until, options = self._core.now, self._core.options
        if event.deadline_at < float("inf"):
            until = min(event.deadline_at, until + options.lease_ttl_max_s)
        until += options.prefetch_window_s
        return self._prefetching.bring(Expected(rows, until, "a client asked"), Urgency.WAITING)

    def pin(self, event: PinRequested) -> None:
        """Keep a stored prefix at or above a floor tier."""
        requests = self._requests
        checked = requests.check(event.call, event.client, event.namespace_id, event.prefix_hashes)
        if checked is None:
            return None
        namespace = checked[1]
        earlier = requests.earlier(event.client, event.request_id)
        if isinstance(earlier, PinEntry) and self._pins.is_alive(earlier):
            return requests.reply(event.call, PinResult(earlier.id, len(earlier.blocks)))
        if event.ttl_s > self._core.options.pin_ttl_max_s:
            message = f"ask for at most {self._core.options.pin_ttl_max_s:g} s"
            return requests.refuse(event.call, "LEASE_TTL_TOO_LARGE", message)
        if event.floor not in self._core.rooms:
            return requests.refuse(event.call, "BAD_TIER", f"this daemon has no tier {event.floor.label}")
        catalog = self._core.catalog
        rows = stored_prefix(self._core, namespace, event.prefix_hashes)
        pinnable_bytes = requests.quotas.pinnable_bytes(checked[0])
        if pinnable_bytes is not None and self._pins.new_bytes(rows, event.floor) > pinnable_bytes:
            message = f"the tenant may pin {pinnable_bytes} bytes more; unpin or release some"
            return requests.refuse(event.call, "QUOTA_EXCEEDED", message, 1.0)
        domain = namespace.identity.domain
        if objection := self._pins.objection(rows, event.floor, tenant_of(domain)):
            return requests.refuse(event.call, "TIER_FULL", objection, 1.0)
        pin = self._pins.pin(rows, event.floor, event.ttl_s, domain)
        requests.remember(event.client, event.request_id, pin)
        at_floor = self._core.ladder.tiers[: event.floor + 1]
        for row in rows:
            if not any(catalog.num_resident[tier][row] == namespace.num_groups for tier in at_floor):
                self._loads.promote(row, event.floor, Urgency.QUEUED, float("inf"))
        self._loads.start(Urgency.QUEUED, float("inf"))
        return requests.reply(event.call, PinResult(pin.id, len(rows)))
