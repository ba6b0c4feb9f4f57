"""The `access:` and `tenants:` sections of the settings: authentication of callers, and quotas of tenants.

access:
  tokens: /etc/kvtier/tokens
  tls: {certificate: /etc/kvtier/tls.crt, key: /etc/kvtier/tls.key, client_ca: /etc/kvtier/ca.crt}
  admin: [uid:0, "uri:spiffe://cluster/ns/ops/*"]
tenants:
  acme: {members: [uid:1001, "dns:*.acme.svc"], quota: {dram: 16GiB, requests_per_s: 500}}

A caller's tenant follows from its credentials (the kernel's on a Unix socket, a certificate, a token), never
from a request field. An identity in two places is refused: the tenant of a caller must not depend on the
order of a file.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

from ...tiers.ladder import Ladder
from ..core.options import SHARE_MODES, ShareMode, TenantQuota
from .fields import Bytes, Directory, Section, Share, refuse

MAX_TENANTS = 256
COMMON = "common:"  # the domain without a name, as printed and as written in commands
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_IDENTITY = r"(uid|gid):[0-9]{1,10}|token:[a-z0-9][a-z0-9._-]{0,62}|(dns|uri):\S+"
_GROUP = "group:"


def check_name(name: str) -> str:
    """Return the name of a tenant, group or token. Raises ValueError.

    It has no ':' and '/', which separate such names in isolation domains.
    """
    if _NAME.fullmatch(name) is None:
        raise ValueError(f"{name!r} is no name; write lower case letters, digits, '.', '_', '-', at most 63")
    return name


def domain_named(name: str) -> str:
    """Return the first part of the isolation domains that a name in a command means.
    Raises ValueError for what is no name."""
    if name == COMMON:
        return ""
    if not name or "/" in name:
        raise ValueError("name a tenant, or group:NAME, public: or common:")
    return name if ":" in name else f"tenant:{name}"


def _check_identity(identity: object) -> object:
    """Return an identity `kind:value`; ids of users and groups without leading zeros."""
    if not isinstance(identity, str) or re.fullmatch(_IDENTITY, identity) is None:
        raise ValueError(f"{identity!r} is no identity; write uid:N, gid:N, dns:NAME, uri:NAME or token:NAME")
    kind, _, value = identity.partition(":")
    if kind not in ("uid", "gid"):
        return identity
    if int(value) >= 1 << 32:
        raise ValueError(f"{identity!r}: the largest id is {(1 << 32) - 1}")
    return f"{kind}:{int(value)}"


def _check_sharing(sharing: object) -> object:
    if isinstance(sharing, str) and sharing.startswith(_GROUP):
        return f"{_GROUP}{check_name(sharing.removeprefix(_GROUP))}"
    if sharing not in ("tenant", "public", "all"):
        raise ValueError(f"{sharing!r} is not known; write tenant, group:NAME, public or all")
    return sharing


Name = Annotated[str, AfterValidator(check_name)]
Identity = Annotated[
    str, BeforeValidator(_check_identity), WithJsonSchema({"type": "string", "pattern": f"^({_IDENTITY})$"})
]
Sharing = Annotated[
    str,
    BeforeValidator(_check_sharing),
    WithJsonSchema({"type": "string", "pattern": r"^(tenant|public|all|group:[a-z0-9][a-z0-9._-]{0,62})$"}),
]
File = Directory  # an absolute path, too


def tokens_among(identities: Iterable[str]) -> list[str]:
    """Return the names of the bearer tokens among identities."""
    return [one.removeprefix("token:") for one in identities if one.startswith("token:")]


class Tls(Section):
    """TLS for TCP addresses. Changed files are read again; open connections keep the old certificate."""

    certificate: File
    """Certificate chain of the daemon, PEM. Set it to what your authority issued for this host."""
    key: File
    """Private key of the certificate, PEM. Set it with the certificate."""
    client_ca: File | None = None
    """Authorities that sign client certificates, PEM. Set it where callers have certificates; without it none
    is requested, and every call over TCP needs a bearer token of `access.tokens`."""


class Access(Section):
    """The `access:` section."""

    tls: Tls | None = None
    """Required for TCP addresses: TLS 1.3 with client certificates or bearer tokens."""
    insecure: bool = False
    """Serves TCP without TLS or authentication: every caller that reaches the port is accepted. Set it in
    isolated networks only."""
    tokens: File | None = None
    """File of bearer tokens, one line each: name and SHA-256 of the token, as `kvtier tenant token` prints.
    Set it for callers without client certificates."""
    admin: list[Identity] = []
    """Identities of administrators, written as `members` of a tenant: callers of AdminService and
    EventsService, beside the daemon's own user. Set it to admit operators over TCP, or to keep root out,
    which needs a daemon of another user. Empty: root, too, on the Unix socket."""


class QuotaSettings(Section):
    """Resources of a tenant; what is not set is bounded by the tiers only.

    Keys with other names are further memories of `tiers`, in whole extents.
    """

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Bytes] = Field(init=False)

    hbm_bytes: Bytes | None = Field(default=None, alias="hbm")
    """Memory of hbm, in whole extents. Set it where one tenant must not evict the others."""
    dram_bytes: Bytes | None = Field(default=None, alias="dram")
    """Memory of dram, in whole extents. Set it where one tenant must not evict the others."""
    nvme_bytes: Bytes | None = Field(default=None, alias="nvme")
    """Payload in nvme; at the limit the ends of the tenant's oldest chains are evicted. Set it where one
    tenant must not evict the others."""
    pinned_bytes: Bytes | None = Field(default=None, alias="pinned")
    """Memory that leases and pins of all clients of the tenant may hold. Set it where one tenant must not
    block evictions."""
    requests_per_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Calls per second over all clients of the tenant, with bursts of one second's worth. Set it to protect
    the daemon from a client in a loop. Gets from shared memory make no call."""

    @property
    def by_tier(self) -> dict[str, int]:
        """The quota in bytes of each tier that has one, by the tier's name."""
        given = {"hbm": self.hbm_bytes, "dram": self.dram_bytes, **(self.__pydantic_extra__ or {})}
        given["nvme"] = self.nvme_bytes
        return {name: num_bytes for name, num_bytes in given.items() if num_bytes is not None}

    @property
    def has_bytes(self) -> bool:
        """Return whether anything but the rate of calls is limited."""
        return bool(self.by_tier) or self.pinned_bytes is not None

    def for_planner(self, ladder: Ladder) -> TenantQuota:
        """Return the quota in bytes for the planner. Raises ValueError for a tier that is not there."""
        memory = {ladder.named(name): num_bytes for name, num_bytes in self.by_tier.items()}
        in_log = memory.pop(ladder.log_tier, None)
        return TenantQuota(memory, self.pinned_bytes, in_log)


class Tenant(Section):
    """One tenant: its identities, sharing and quotas."""

    members: Annotated[list[Identity], Field(min_length=1)]
    """Identities of its callers, one match is enough: `uid:N` and `gid:N` (user and primary group of a
    process on this host, a user goes first), `dns:NAME` and `uri:NAME` in client certificates (`*` matches
    one part between dots or slashes), `token:NAME` of a bearer token in the file `access.tokens`."""
    sharing: Sharing = "tenant"
    """Readers of the tenant's blocks: the `tenant`, the tenants of `group:NAME`, every tenant that is
    `public`, or `all` including callers from before there were tenants. Widen it for tenants that serve the
    same prompts and may learn of each other's."""
    quota: QuotaSettings = QuotaSettings()
    """Resources of the tenant."""
    bandwidth_share: Annotated[float, Field(gt=0, le=1000, allow_inf_nan=False)] = 1.0
    """Weight of the tenant's copies against equally urgent ones of other tenants, on every edge. Raise it for
    tenants that pay for more; unused bandwidth goes to the others. Shares of a group add up."""
    share: Share | None = None
    """What this host stores in the object store of this tenant's blocks, instead of `object.share`. Set `off`
    for prompts that must not leave the host. Of tenants that share blocks the least counts."""
    most_urgent: Literal["decoding", "prefill", "queued", "waiting", "idle"] = "decoding"
    """Highest urgency of the tenant's requests; higher ones are lowered to it. Set `idle` or `waiting` for
    batch work."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.sharing != "tenant" and self.quota.has_bytes:
            refuse(
                "quota", "shared blocks count for no single tenant; give no bytes, or write `sharing: tenant`"
            )
        return self

    def domain(self, name: str) -> str:
        """Return the isolation domain of this tenant, called `name`; empty: the common one."""
        own = {"tenant": f"tenant:{name}", "public": "public:", "all": ""}
        return own.get(self.sharing, self.sharing)


Tenants = Annotated[dict[Name, Tenant], Field(max_length=MAX_TENANTS)]


def quotas_of(tenants: Mapping[str, Tenant], ladder: Ladder) -> dict[str, TenantQuota]:
    """Return the quotas in bytes by isolation domain."""
    return {
        tenant.domain(name): tenant.quota.for_planner(ladder)
        for name, tenant in tenants.items()
        if tenant.quota.has_bytes
    }


def shares_of(tenants: Mapping[str, Tenant], share: ShareMode) -> dict[str, ShareMode]:
    """Return what is stored of each isolation domain in the object store, where tenants say so."""
    wanted: defaultdict[str, list[ShareMode | None]] = defaultdict(list)
    for name, tenant in tenants.items():
        wanted[tenant.domain(name)].append(tenant.share)
    return {
        domain: min((one or share for one in said), key=SHARE_MODES.index)
        for domain, said in wanted.items()
        if any(said)
    }


def bandwidth_shares_of(tenants: Mapping[str, Tenant]) -> dict[str, float]:
    """Return the weight of each tenant's isolation domain."""
    shares: defaultdict[str, float] = defaultdict(float)
    for name, tenant in tenants.items():
        shares[tenant.domain(name)] += tenant.bandwidth_share
    return dict(shares)


def check_access(access: Access, tenants: Mapping[str, Tenant], has_tcp: bool) -> None:
    """Refuse contradictions between the two sections and the addresses."""
    if has_tcp and access.tls is None and not access.insecure:
        refuse(
            "listen",
            "a TCP address needs access.tls (certificate, key, and client_ca or access.tokens), or "
            "access.insecure: true in a network where every host may call",
        )
    if access.tls is not None and access.tls.client_ca is None and access.tokens is None:
        refuse(
            "access",
            "without access.tls.client_ca callers over TCP authenticate by tokens only; give "
            "access.tokens, or client_ca",
        )
    owner: dict[str, str] = {}
    for name, tenant in tenants.items():
        for identity in tenant.members:
            other = owner.setdefault(identity, name)
            if other != name:
                refuse("tenants", f"{identity} belongs to {other} and to {name}; name it once")
    members = [identity for tenant in tenants.values() for identity in tenant.members]
    named = tokens_among([*access.admin, *members])
    if named and access.tokens is None:
        refuse("access", f"token {named[0]} is named, but access.tokens names no file")
