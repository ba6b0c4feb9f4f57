"""The `access:` and `tenants:` sections of the settings: who may call, and what each tenant may take.

access:
  tokens: /etc/kvtier/tokens
  tls: {certificate: /etc/kvtier/tls.crt, key: /etc/kvtier/tls.key, client_ca: /etc/kvtier/ca.crt}
  admin: {uids: [0], sans: ["uri:spiffe://cluster/ns/ops/*"]}
tenants:
  acme: {uids: [1001], sans: ["dns:*.acme.svc"], quota: {dram: 16GiB, requests_per_s: 500}}

A tenant is found by what was proven (the kernel's word on a Unix socket, a certificate, a token), never
by what a request says. An identity in two places is refused here: which of two tenants somebody is must not
depend on the order of a file.
"""

import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from ...tiers.block import Tier
from ..core.options import Quota as PlannerQuota
from .fields import Bytes, Directory, Section, refuse

MAX_TENANTS = 256
COMMON = "common:"  # how people read and write the domain that has no name
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_SAN = re.compile(r"(dns|uri):[^\s]+")


def check_name(name: str) -> str:
    """Return the name of a tenant, group or token. Raises ValueError. Without ':' and '/', which the
    isolation domains made of such names use as separators."""
    if _NAME.fullmatch(name) is None:
        raise ValueError(f"{name!r} is no name; write lower case letters, digits, '.', '_', '-', at most 63")
    return name


def _check_san(pattern: str) -> str:
    if _SAN.fullmatch(pattern) is None:
        raise ValueError(f"{pattern!r} is no subject alternative name; write dns:NAME or uri:NAME")
    return pattern


Name = Annotated[str, AfterValidator(check_name)]
San = Annotated[str, AfterValidator(_check_san)]
Id = Annotated[int, Field(ge=0, lt=1 << 32)]
File = Directory  # an absolute path, too


class Identities(Section):
    """By what somebody is known. Any one of them is enough."""

    uids: list[Id] = []
    """User ids of processes on this host, as the kernel tells them."""
    gids: list[Id] = []
    """Primary group ids of such processes; a user id that is named somewhere goes before."""
    sans: list[San] = []
    """Names in client certificates: dns:NAME or uri:NAME; `*` stands for one part between dots or slashes."""
    tokens: list[Name] = []
    """Names of bearer tokens, lines of the file `access.tokens`."""

    def all(self) -> set[str]:
        """Return every identity as `kind:value`."""
        return {
            *(f"uid:{uid}" for uid in self.uids),
            *(f"gid:{gid}" for gid in self.gids),
            *self.sans,
            *(f"token:{name}" for name in self.tokens),
        }


class Tls(Section):
    """Certificates for TCP. Read again when the files change; connections that stand keep theirs."""

    certificate: File
    """The daemon's certificate and what leads to its authority, PEM."""
    key: File
    """The key of the certificate, PEM."""
    client_ca: File | None = None
    """Authorities whose client certificates are accepted, PEM. Without it no certificate is asked for, and
    every call over TCP needs a bearer token of `access.tokens`."""


class Access(Section):
    """How callers prove who they are."""

    tls: Tls | None = None
    """Needed to listen on TCP: TLS 1.3 with client certificates, or with bearer tokens."""
    insecure: bool = False
    """Listen on TCP without TLS: everybody who reaches the port is a caller. For isolated networks only."""
    tokens: File | None = None
    """File of bearer tokens, a line each: name and SHA-256 of the token (`kvtier tenant token` makes one)."""
    admin: Identities = Identities()
    """Who may call AdminService and EventsService. Nobody named: the daemon's own user and root, on the Unix
    socket."""


class Quota(Section):
    """What a tenant may take; what is not named is bounded by the tiers only."""

    hbm_bytes: Bytes | None = Field(default=None, alias="hbm")
    """Memory of the hot tier. Whole extents are given; what is left over is not."""
    dram_bytes: Bytes | None = Field(default=None, alias="dram")
    """Memory of the warm tier. Whole extents are given; what is left over is not."""
    nvme_bytes: Bytes | None = Field(default=None, alias="nvme")
    """Payload in the cold tier. At the limit the ends of its oldest chains go."""
    pinned_bytes: Bytes | None = Field(default=None, alias="pinned")
    """Memory that leases and pins of all its clients may hold together."""
    requests_per_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Calls a second, over all its clients, with bursts of one second's worth. Gets that are answered from
    shared memory are no calls."""

    @property
    def has_bytes(self) -> bool:
        """Whether anything but the rate of calls is limited."""
        given = (self.hbm_bytes, self.dram_bytes, self.nvme_bytes, self.pinned_bytes)
        return any(num_bytes is not None for num_bytes in given)

    def for_planner(self) -> PlannerQuota:
        """Return what the pure core needs of it."""
        by_tier = {Tier.HBM: self.hbm_bytes, Tier.DRAM: self.dram_bytes}
        memory = {tier: num_bytes for tier, num_bytes in by_tier.items() if num_bytes is not None}
        return PlannerQuota(memory, self.pinned_bytes, self.nvme_bytes)


class Tenant(Identities):
    """One tenant: who belongs to it, with whom it shares, what it may take."""

    sharing: Literal["tenant", "group", "public", "all"] = "tenant"
    """Who reads what it stores: itself; its `group`; every tenant that says public; also callers before there
    were tenants."""
    group: str = ""
    """Name of the group, with `sharing: group`."""
    quota: Quota = Quota()
    """What it may take."""
    bandwidth_share: Annotated[float, Field(gt=0, le=1000, allow_inf_nan=False)] = 1.0
    """Of the bandwidth of every edge, as a weight against other tenants whose copies wait at the same
    urgency. What nobody else wants may be used by anybody. The shares of one group add up."""
    most_urgent: Literal["decoding", "prefill", "queued", "waiting", "idle"] = "decoding"
    """The highest urgency its requests have; what asks for more gets this."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.all():
            refuse("uids", "nobody belongs to this tenant; name uids, gids, sans or tokens")
        if (self.sharing == "group") != bool(self.group):
            refuse("group", "a group needs `sharing: group`, and that a group's name")
        if self.group:
            try:
                check_name(self.group)
            except ValueError as error:
                refuse("group", str(error))
        if self.sharing != "tenant" and self.quota.has_bytes:
            refuse("quota", "blocks that are shared are nobody's alone; give no bytes, or `sharing: tenant`")
        return self

    def domain(self, name: str) -> str:
        """Return the isolation domain of this tenant, whose name is `name`; empty: the common one."""
        return {"tenant": f"tenant:{name}", "group": f"group:{self.group}", "public": "public:", "all": ""}[
            self.sharing
        ]


Tenants = Annotated[dict[Name, Tenant], Field(max_length=MAX_TENANTS)]


def quotas_of(tenants: Mapping[str, Tenant]) -> dict[str, PlannerQuota]:
    """Return the quotas in bytes, by the name that the pure core knows a tenant by."""
    return {
        tenant.domain(name): tenant.quota.for_planner()
        for name, tenant in tenants.items()
        if tenant.quota.has_bytes
    }


def bandwidth_shares_of(tenants: Mapping[str, Tenant]) -> dict[str, float]:
    """Return the weight of each tenant's isolation domain."""
    shares: defaultdict[str, float] = defaultdict(float)
    for name, tenant in tenants.items():
        shares[tenant.domain(name)] += tenant.bandwidth_share
    return dict(shares)


def check_access(access: Access, tenants: Mapping[str, Tenant], has_tcp: bool) -> None:
    """Refuse what contradicts itself across the two sections and the addresses."""
    if has_tcp and access.tls is None and not access.insecure:
        refuse(
            "listen",
            "a TCP address needs access.tls (certificate, key, and client_ca or access.tokens), or "
            "access.insecure: true "
            "in a network where everybody may call",
        )
    if access.tls is not None and access.tls.client_ca is None and access.tokens is None:
        refuse(
            "access",
            "without access.tls.client_ca callers over TCP prove themselves by tokens only; give "
            "access.tokens, "
            "or client_ca",
        )
    owner: dict[str, str] = {}
    for name, tenant in tenants.items():
        for identity in sorted(tenant.all()):
            other = owner.setdefault(identity, name)
            if other != name:
                refuse("tenants", f"{identity} belongs to {other} and to {name}; name it once")
    named = [*access.admin.tokens, *(token for tenant in tenants.values() for token in tenant.tokens)]
    if named and access.tokens is None:
        refuse("access", f"token {named[0]} is named, but access.tokens names no file")
