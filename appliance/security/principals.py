"""Authenticator: the principal of a caller, from what was proven, and its tenant.

    Unix socket   the kernel says the user and group of the process         of_peer
    TLS           the certificate says names, an authority vouches for them  of_certificate
    token         the name in the token file; goes before both               of_token
    plain TCP     nothing; only with access.insecure                         of_plain_tcp

The answer is a Principal. No field of a request takes part: a caller cannot name its tenant, only be it.
What every call asks of a principal is the table RIGHTS in rights.py.

Without tenants there is one, the common one: every process that may open the socket uses it.
With tenants, a caller that belongs to none may touch no block.
"""

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ...tiers.block import Urgency
from ..config import Access as AccessSettings
from ..config import Tenant
from ..errors import error
from .tokens import TokenFile

ROOT = 0
ANONYMOUS = "anonymous"  # the name of a principal that proved nothing


@dataclass(frozen=True, slots=True)
class Tenancy:
    """What a tenant is to the calls of its clients."""

    name: str  # empty: the common one
    domain: str  # isolation domain that its namespaces belong to
    most_urgent: Urgency = Urgency.DECODING

    @property
    def share(self) -> str:
        """Return which share of a limit it uses: its isolation domain's; in the common one its own."""
        return self.domain or self.name


COMMON = Tenancy("", "")


@dataclass(frozen=True, slots=True)
class Principal:
    """The proven identity of a caller."""

    name: str  # what clients are bound to and messages say: "uid 1000", "dns:rt.acme.svc", "token ops"
    tenancy: Tenancy | None
    is_admin: bool = False
    is_host: bool = False  # another host of the fleet

    @property
    def lane(self) -> str:
        """Return where its calls wait and count: with its tenant's, else by itself."""
        return (self.tenancy.share if self.tenancy is not None else "") or self.name


class Authenticator:
    """Finds principals. Pure; `tokens` is the token file, where there is one."""

    def __init__(
        self,
        settings: AccessSettings,
        tenants: Mapping[str, Tenant],
        own_uid: int | None = None,
        host_name: str | None = None,
    ) -> None:
        """Raises StartError when the token file cannot be read. `own_uid`: the daemon's by default.

        `host_name`: in the certificates of the fleet's hosts; empty: every caller over plain TCP may be one;
        None: there is no fleet."""
        self._host_name = host_name
        own = os.getuid() if own_uid is None else own_uid
        self._own_uids = {ROOT, own}
        self._admins = {f"uid:{own}", *(settings.admin or [f"uid:{ROOT}"])}  # itself: it is drained so
        self.tokens = TokenFile(settings.tokens) if settings.tokens is not None else None
        self.adopt(tenants)

    def adopt(self, tenants: Mapping[str, Tenant]) -> None:
        """Replace the tenants. Clients of local connections keep theirs until `LocalServer.adopt` looks."""
        self._has_tenants = bool(tenants)
        self._tenancies = {
            name: Tenancy(name, tenant.domain(name), Urgency[tenant.most_urgent.upper()])
            for name, tenant in tenants.items()
        }
        self._tenant_of = {identity: name for name, tenant in tenants.items() for identity in tenant.members}
        named = {*self._tenant_of, *self._admins}
        self._patterns = [(_pattern(san), san) for san in named if san[:4] in ("dns:", "uri:")]
        self._known: dict[tuple[str, ...], Principal] = {}  # of certificates, by their names

    @property
    def has_tenants(self) -> bool:
        """Whether the policy names tenants, which must not see each other."""
        return self._has_tenants

    def token_name(self, token: str) -> str | None:
        """Return the name of a token, None for an unknown one."""
        return self.tokens.name_of(token) if self.tokens is not None else None

    def of_peer(self, uid: int, gid: int) -> Principal:
        """Return the principal of a process on this host."""
        identities = (f"uid:{uid}", f"gid:{gid}")
        tenants = [self._tenant_of[identity] for identity in identities if identity in self._tenant_of]
        return self._principal(f"uid {uid}", tenants[:1], not self._admins.isdisjoint(identities))

    def is_stranger(self, uid: int, gid: int, may_have_token: bool = False) -> bool:
        """Return whether a process on this host may do nothing, because there are tenants.

        It belongs to none of them, is no administrator, not root and not the daemon's own user. With
        `may_have_token`, at a socket that takes tokens, where there are some, no process is a stranger.
        """
        if not self._has_tenants or uid in self._own_uids or (may_have_token and self.tokens is not None):
            return False
        principal = self.of_peer(uid, gid)
        return principal.tenancy is None and not principal.is_admin

    def of_certificate(self, names: Iterable[str]) -> Principal:
        """Return the principal of a verified client certificate with these names (dns:..., uri:...).

        One that fits two tenants belongs to neither: it does not say which is meant.
        """
        names = tuple(sorted(names))
        known = self._known.get(names)
        if known is None:
            fitting = {san for pattern, san in self._patterns if any(map(pattern.fullmatch, names))}
            tenants = sorted({self._tenant_of[san] for san in fitting & self._tenant_of.keys()})
            is_admin = not self._admins.isdisjoint(fitting)
            is_host = bool(self._host_name) and f"dns:{self._host_name}" in names
            known = self._principal(
                " ".join(names) or "a certificate without names", tenants, is_admin, is_host
            )
            if len(self._known) < 4096:  # every one was signed by the authority; bounded all the same
                self._known[names] = known
        return known

    def of_token(self, token: str) -> Principal:
        """Return the principal of a token. Raises AccessError for an unknown one."""
        name = self.token_name(token)
        if name is None:
            raise error("NOT_AUTHENTICATED", "the bearer token is not known; ask for a new one, or send none")
        identity = f"token:{name}"
        tenants = [self._tenant_of[identity]] if identity in self._tenant_of else []
        return self._principal(f"token {name}", tenants, identity in self._admins)

    def of_plain_tcp(self) -> Principal:
        """Return the principal of a caller over TCP without TLS, which proves nothing."""
        return self._principal(ANONYMOUS, [], False, is_host=self._host_name == "")

    def _principal(self, name: str, tenants: list[str], is_admin: bool, is_host: bool = False) -> Principal:
        if not self._has_tenants:
            return Principal(name, COMMON, is_admin, is_host)
        tenancy = self._tenancies[tenants[0]] if len(tenants) == 1 else None
        return Principal(name, tenancy, is_admin, is_host)


def tenancy_of(principal: Principal) -> Tenancy:
    """Return the tenant of a caller. Raises AccessError when it has none."""
    if principal.tenancy is None:
        raise error(
            "NO_TENANT",
            f"{principal.name} belongs to no tenant, or to several; name it under one tenant",
        )
    return principal.tenancy


def require_admin(principal: Principal) -> None:
    """Raise AccessError unless the caller is an administrator."""
    if not principal.is_admin:
        raise error("NOT_ADMIN", f"{principal.name} is no administrator; name it under `access.admin`")


def require_host(principal: Principal) -> None:
    """Raise AccessError unless the caller is another host of the fleet."""
    if not principal.is_host:
        raise error(
            "NOT_A_HOST",
            f"{principal.name} is no host of this fleet; set `peers` on both hosts, and with TLS a "
            "certificate with `peers.certificate_name`",
        )


def covers(identity: str, other: str) -> bool:
    """Return whether all callers that `other` names are named by `identity`, too."""
    return _pattern(identity).fullmatch(other) is not None


def _pattern(san: str) -> re.Pattern[str]:
    """Return what a name pattern fits: `*` is one part between dots or slashes."""
    return re.compile("[^./]+".join(map(re.escape, san.split("*"))))
