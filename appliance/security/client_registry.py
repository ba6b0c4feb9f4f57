"""ClientRegistry: the connected clients, their transports, and what the shell itself keeps for them.

A *local* client is a connection of the local channel: it lives as long as the connection and its process,
and owns a staging extent. A *remote* one opened itself over gRPC and lives as long as it keeps alive. What
either of them holds (leases, reservations) is the planner's to know; here is only what the planner must
not know: names for people, staging, process ids.

A remote client belongs to the identity that opened it (`owner`). Ids are random: without proof of identity
(access.insecure) that of a remote client is its only credential.
"""

import asyncio
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ...tiers.block import Tier, tenant_of
from ...tiers.codecs.streaming import StreamEncoder
from ...tiers.memory.staging import StagingExtent
from ..appliance import Appliance
from ..core.events import ClientOpened
from ..core.shares import Shares
from ..errors import error
from ..transfer.lanes import Route

#: Silence after which a client without a local connection is closed: what OpenClient gets when it asks for no
#: other (idle connections make no call, so a client that stays idle for longer asks for more), and the most.
CLIENT_TTL_S, MAX_CLIENT_TTL_S = 60.0, 3600.0
_LOCAL_ID_BITS, _REMOTE_ID_BITS = 32, 62  # remote ids stand above the local ones


@dataclass(slots=True)
class ConnectedClient:
    """One caller. `expires_at` is infinite for local ones; `staging_bytes` is 0 without staging."""

    id: int
    name: str
    domain: str
    local: bool
    ttl_s: float = 0.0
    expires_at: float = float("inf")
    request_id: str = ""
    staging: StagingExtent | None = None
    staging_bytes: int = 0
    pid: int = 0
    uid: int = -1
    owner: str = ""  # remote ones: name of the principal that opened it
    encoder: StreamEncoder | None = None  # remote ones that read codecs: what is known of their connection
    receiving: set[asyncio.Timeout] = field(default_factory=set)  # of streamed puts in progress


class ClientRegistry:
    """The registry, bounded by `max_clients`, of which each tenant has a share. Tells the planner of clients.

    `staging` counts the bytes of staging extents by tenant (local_server.py).
    """

    def __init__(self, appliance: Appliance, max_clients: int, num_tenants: int = 0) -> None:
        self._appliance = appliance
        self._shares = Shares(max_clients, num_tenants)
        self.staging = Shares(0, 0)
        self._by_id: dict[int, ConnectedClient] = {}
        self._by_request: dict[tuple[str, str], ConnectedClient] = {}  # remote ones: OpenClient is idempotent

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[ConnectedClient]:
        return iter(list(self._by_id.values()))

    def limit(self, max_clients: int, num_tenants: int) -> None:
        """Set the largest number of clients. Clients that are registered stay."""
        self._shares.resize(max_clients, num_tenants)

    def get(self, client_id: int) -> ConnectedClient | None:
        """Return a client, None when it is unknown or was silent for too long."""
        client = self._by_id.get(client_id)
        if client is not None and client.expires_at <= self._appliance.clock():
            self.close(client_id, "silent for longer than its ttl")
            return None
        return client

    def open_local(
        self,
        name: str,
        domain: str,
        staging: StagingExtent,
        routes: Mapping[Tier, Route],
        pid: int,
        uid: int,
    ) -> ConnectedClient:
        """Register a connection of the local channel with its staging extent. Raises BusyError."""
        return self._open(name, domain, routes, pid, uid, staging)

    def open_pages(self, owner: ConnectedClient, routes: Mapping[Tier, Route]) -> ConnectedClient:
        """Register what holds leases and makes puts for registered pages of `owner`, which it may outlive:
        a device may still be copying. `routes` lead out of the pages. Raises BusyError."""
        return self._open(f"pages of {owner.name or owner.id}", owner.domain, routes, owner.pid, owner.uid)

    def open_fleet(self, domain: str) -> ConnectedClient:
        """Register what holds blocks of an isolation domain while other hosts read them. Raises BusyError."""
        return self._open("other hosts", domain, {})

    def _open(
        self,
        name: str,
        domain: str,
        routes: Mapping[Tier, Route],
        pid: int = 0,
        uid: int = -1,
        staging: StagingExtent | None = None,
    ) -> ConnectedClient:
        self._make_room(domain)
        client = ConnectedClient(self._draw_id(True), name, domain, True, pid=pid, uid=uid)
        if staging is not None:
            client.staging, client.staging_bytes = staging, staging.num_bytes
        self._add(client)
        self._appliance.mover.attach(client.id, routes)
        self._appliance.step(ClientOpened(client.id, client.name, True, client.domain))
        return client

    def open_remote(
        self,
        name: str,
        request_id: str,
        ttl_s: float,
        routes: Mapping[Tier, Route],
        domain: str,
        owner: str,
    ) -> ConnectedClient:
        """Register a client that came over gRPC; `ttl_s` 0 means the default.

        The same request id of the same owner finds the same client. Raises BusyError.
        """
        known = self._by_request.get((owner, request_id))
        if known is not None and self.get(known.id) is known:
            return known
        self._make_room(domain)
        now = self._appliance.clock()
        client = ConnectedClient(self._draw_id(False), name, domain, False, owner=owner)
        client.ttl_s = ttl_s or CLIENT_TTL_S
        client.expires_at = now + client.ttl_s
        client.request_id = request_id
        self._add(client)
        if request_id:
            self._by_request[owner, request_id] = client
        self._appliance.mover.attach(client.id, routes)
        self._appliance.step(ClientOpened(client.id, name, False, domain, client.ttl_s))
        return client

    def heard_of(self, client: ConnectedClient) -> None:
        """A remote client gave a sign of life."""
        if not client.local:
            client.expires_at = self._appliance.clock() + client.ttl_s

    def close(self, client_id: int, reason: str) -> None:
        """Release everything that a client holds.

        Idempotent. Copies in flight keep what they read of its staging extent until they end.
        """
        client = self._by_id.pop(client_id, None)
        if client is None:
            return
        self._by_request.pop((client.owner, client.request_id), None)
        self._shares.give(tenant_of(client.domain), 1)
        self._appliance.client_gone(client_id, reason)
        for silence in client.receiving:
            if not silence.expired():
                silence.reschedule(0.0)  # at once
        if client.staging is not None:
            client.staging.close()
            client.staging = None
            self.staging.give(tenant_of(client.domain), client.staging_bytes)

    def expire(self) -> float | None:
        """Close the silent ones; return when the next one would be, on the appliance's clock."""
        now = self._appliance.clock()
        for client in self:
            if client.expires_at <= now:
                self.close(client.id, "silent for longer than its ttl")
        return min((client.expires_at for client in self), default=None)

    def _draw_id(self, local: bool) -> int:
        """Return the id of a new client. A counter would tell how many others there are."""
        while True:
            above = 0 if local else 1 << _LOCAL_ID_BITS
            number = above + secrets.randbits(_LOCAL_ID_BITS if local else _REMOTE_ID_BITS)
            if number and number not in self._by_id:
                return number

    def _add(self, client: ConnectedClient) -> None:
        self._by_id[client.id] = client
        self._shares.add(tenant_of(client.domain), 1)

    def _make_room(self, domain: str) -> None:
        """Raise BusyError unless the tenant of an isolation domain may have one more client."""
        tenant = tenant_of(domain)
        if not self._shares.may_take(tenant, 1):
            self.expire()
        if not self._shares.may_take(tenant, 1):
            message = (
                f"limits.max_clients: the tenant has {self._shares.held(tenant)} clients open, its share of "
                f"{self._shares.capacity}; close some, or raise the limit"
            )
            raise error("TOO_MANY_CLIENTS", message, retry_after_s=1.0)
