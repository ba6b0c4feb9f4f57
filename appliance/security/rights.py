"""Rights: what every call asks of its caller. The table that the server obeys and docs/security.md shows.

`role` is the right that a call needs; `foreign` is the answer to a tenant that names what belongs to another
one: the same as for what does not exist, so that an answer never tells whether it does.
"""

from enum import Enum
from typing import NamedTuple

from ...v1.local import Method
from .principals import Principal, require_admin, require_host, tenancy_of


class Role(Enum):
    """The right that a call needs."""

    ANYONE = "every caller"
    TENANT = "a tenant"
    ADMIN = "an administrator"
    WATCHER = "a tenant, of what it may read; an administrator, of everything"
    HOST = "a host of the fleet"


class Right(NamedTuple):
    """One line of the table."""

    role: Role
    foreign: str = ""  # reason of the refusal; empty: names nothing, or nothing happens
    is_limited: bool = False  # counts against `quota.requests_per_s`; what gives something back never does

    def require(self, principal: Principal) -> None:
        """Raise AccessError unless `principal` may make the call."""
        if self.role is Role.ADMIN:
            require_admin(principal)
        elif self.role is Role.HOST:
            require_host(principal)
        elif self.role is Role.TENANT or (self.role is Role.WATCHER and not principal.is_admin):
            tenancy_of(principal)

    def is_administrative(self, principal: Principal) -> bool:
        """Return whether `principal` makes the call as an administrator."""
        return self.role is Role.ADMIN or (self.role is Role.WATCHER and principal.is_admin)

    def lane(self, principal: Principal) -> str:
        """Return the queue in which a caller's calls of this kind wait.

        What gives something back and what administrates has its own: it gets its turn while other calls of
        the same caller are refused.
        """
        if self.is_administrative(principal):
            return f"administrator {principal.name}"
        return principal.lane if self.is_limited else f"{principal.lane}, giving back"


_ASKS = Right(Role.TENANT, "UNKNOWN_CLIENT", is_limited=True)
_GIVES_BACK = Right(Role.TENANT, "UNKNOWN_CLIENT")
_ADMIN = Right(Role.ADMIN)

RIGHTS: dict[str, Right] = {
    "KVCacheService/GetServerInfo": Right(Role.ANYONE),
    "KVCacheService/OpenClient": Right(Role.TENANT, is_limited=True),
    "KVCacheService/CloseClient": Right(Role.TENANT),
    "KVCacheService/RegisterNamespace": Right(Role.TENANT, is_limited=True),
    "KVCacheService/Lookup": Right(Role.TENANT, "UNKNOWN_NAMESPACE", is_limited=True),
    "KVCacheService/Rank": Right(Role.WATCHER, "UNKNOWN_NAMESPACE", is_limited=True),
    "KVCacheService/Acquire": _ASKS,
    "KVCacheService/Release": _GIVES_BACK,
    "KVCacheService/KeepAlive": _GIVES_BACK,
    "KVCacheService/Touch": _GIVES_BACK,
    "KVCacheService/Reserve": _ASKS,
    "KVCacheService/Commit": _ASKS,
    "KVCacheService/Abort": _GIVES_BACK,
    "KVCacheService/Pin": _ASKS,
    "KVCacheService/Unpin": Right(Role.TENANT),
    "KVCacheService/Prefetch": _ASKS,
    "KVCacheService/UpdateSession": _ASKS,
    "KVCacheService/ForkSession": _ASKS,
    "KVCacheService/EndSession": _GIVES_BACK,
    "KVCacheService/Put": _ASKS,
    "KVCacheService/Get": _ASKS,
    "AdminService/GetStatus": _ADMIN,
    "AdminService/Inspect": _ADMIN,
    "AdminService/GetStory": _ADMIN,
    "AdminService/Explain": _ADMIN,
    "AdminService/GetPolicy": _ADMIN,
    "AdminService/ApplyPolicy": _ADMIN,
    "AdminService/GetSnapshot": _ADMIN,
    "AdminService/Evict": _ADMIN,
    "AdminService/Drain": _ADMIN,
    "AdminService/ListTenants": _ADMIN,
    "AdminService/EraseTenant": _ADMIN,
    "AdminService/Verify": _ADMIN,
    "AdminService/CheckIntegrity": _ADMIN,
    "EventsService/Watch": Right(Role.WATCHER, is_limited=True),
    "EventsService/WatchAccesses": _ADMIN,
    "PeerService/WatchInventory": Right(Role.HOST),
    "PeerService/FetchBlocks": Right(Role.HOST),
    "PeerService/PushBlocks": Right(Role.HOST),
    "PeerService/AwaitBlocks": Right(Role.HOST),
}


def right_of(service: str, method: str) -> Right:
    """Return what a call asks for. One that the table does not know is for administrators only."""
    return RIGHTS.get(f"{service}/{method}", _ADMIN)


def limited_calls() -> frozenset[Method]:
    """Return the calls of the local channel that count against a tenant's rate."""
    asked = {name.partition("/")[2] for name, right in RIGHTS.items() if right.is_limited}
    by_name = {method.name.replace("_", "").lower(): method for method in Method}
    named = {by_name[name.lower()] for name in asked if name.lower() in by_name}
    return frozenset(named | {Method.GET_PAGES, Method.PUT_PAGES})
