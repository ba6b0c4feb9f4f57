"""Caller: the identity behind one call, and what it may name.

Over the local channel a connection is a client, and the kernel named its process when it connected; over gRPC
every call is looked at anew, and requests name the client they are of. Either way what a call may touch
follows from the principal: clients that the same identity opened, namespaces and pins of its isolation
domain, sessions of its tenant. Everything else does not exist for it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ...tiers.block import Urgency
from ..config import Tenant
from ..errors import error
from . import request_checks as checks
from .client_registry import ClientRegistry, ConnectedClient
from .principals import ANONYMOUS, Principal, Tenancy, tenancy_of

UNKNOWN = Principal(ANONYMOUS, None)


@dataclass(slots=True)
class Caller:
    """The caller of one request.

    Over the local channel it has the connection's client; over gRPC none (requests name theirs), and the
    deadline of the RPC.
    """

    client: ConnectedClient | None = None
    deadline_at: float = float("inf")
    principal: Principal = UNKNOWN

    @property
    def tenancy(self) -> Tenancy:
        """The caller's tenant. Raises AccessError when it has none."""
        return tenancy_of(self.principal)

    @property
    def domain(self) -> str:
        """The isolation domain this caller works in. Raises AccessError."""
        return self.client.domain if self.client is not None else self.tenancy.domain

    def client_in(self, clients: ClientRegistry, client_id: int) -> ConnectedClient:
        """Return the client of a request. Raises UnknownError.

        A connection speaks for itself only; a gRPC caller never for a connection, nor for a client that
        another identity opened.
        """
        if self.client is not None:
            if client_id not in (0, self.client.id):
                raise error("UNKNOWN_CLIENT", f"this connection is client {self.client.id}, not {client_id}")
            return self.client
        client = clients.get(client_id)
        if client is None or client.local or client.owner != self.principal.name:
            raise error("UNKNOWN_CLIENT", "call OpenClient first, and KeepAlive within its ttl")
        clients.heard_of(client)
        return client

    def session(self, field: str, session_id: str) -> str:
        """Return the name a session has inside: two tenants' sessions of one name are two. Empty: none."""
        checks.text(field, session_id)
        if not session_id:
            return ""
        if not session_id.isprintable():
            raise error("BAD_REQUEST", f"{field} has characters that cannot be printed; leave them out")
        tenant = self.tenancy.name
        return f"{tenant}\t{session_id}" if tenant else session_id

    def known_session(self, field: str, session_id: str) -> str:
        """Return the inner name of a session that must be named."""
        if not session_id:
            raise error("BAD_REQUEST", f"{field} must not be empty")
        return self.session(field, session_id)

    def urgency(self, value: int) -> Urgency:
        """Return the urgency of a request: what it says, at most what its tenant may say."""
        return max(checks.urgency(value), self.tenancy.most_urgent)


@dataclass(slots=True)
class RateLimit:
    """A bucket of calls: holds one second's worth, fills at `calls_per_s`. Pure: told what time it is."""

    calls_per_s: float
    _num_left: float = field(default=-1.0, init=False)
    _at: float = field(default=float("-inf"), init=False)

    def take(self, now: float) -> float:
        """Take one call; return 0, or in how many seconds there will be one to take."""
        most = max(1.0, self.calls_per_s)
        self._num_left = min(most, self._num_left + (now - self._at) * self.calls_per_s)
        self._at = now
        if self._num_left >= 1.0:
            self._num_left -= 1.0
            return 0.0
        return (1.0 - self._num_left) / self.calls_per_s


class CallRates:
    """How many calls each tenant makes, over all its clients and both transports."""

    def __init__(self, tenants: Mapping[str, Tenant]) -> None:
        self._limits: dict[str, RateLimit] = {}
        self.adopt(tenants)

    def adopt(self, tenants: Mapping[str, Tenant]) -> None:
        """Replace the limits. An unchanged one goes on counting where it is."""
        wanted = {name: tenant.quota.requests_per_s for name, tenant in tenants.items()}
        before, self._limits = self._limits, {}
        for name, rate in wanted.items():
            if rate is not None:
                known = before.get(name)
                self._limits[name] = known if known and known.calls_per_s == rate else RateLimit(rate)

    def charge(self, caller: Caller, now: float) -> None:
        """Count one call. Raises BusyError, with the time to wait, when it is one too many."""
        if not self._limits or (limit := self._limits.get(caller.tenancy.name)) is None:
            return
        if wait_s := limit.take(now):
            message = f"more than {limit.calls_per_s:g} calls a second; wait, or ask for a higher quota"
            raise error("QUOTA_EXCEEDED", message, retry_after_s=wait_s)


def domain_in(tenancy: Tenancy, wanted: str) -> str:
    """Return the isolation domain of a connection that asks for `wanted`. Raises CallerError.

    It is a part of its tenant's, which a connection can divide and never leave.
    """
    if ":" in wanted:
        raise error("BAD_REQUEST", f"domain {wanted!r} may not have a ':'; write another separator")
    if tenancy.domain and wanted:
        return f"{tenancy.domain}/{wanted}"
    return tenancy.domain or wanted
