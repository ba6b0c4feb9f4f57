"""Checks of the settings alone: what no single field shows, and no host changes."""

from collections.abc import Iterator

from ...v1.bundles import TARGET_BYTES
from ..config import Access, Settings
from ..config.units import format_bytes
from ..core.options import PlannerOptions
from .facts import Facts
from .verdicts import Check, fail, ok, warn

_LOOPBACK = ("localhost", "::1")


def check_policies(facts: Facts, settings: Settings) -> Iterator[Check]:
    """Check that the policies can be built, options included. Runs the code of `policy.allowed_modules`."""
    if why := settings.policy.objection(settings.tiers.ladder):
        what, _, fix = why.partition("; ")
        yield fail("policies", what, fix, "policy")


def check_exports(facts: Facts, settings: Settings) -> Iterator[Check]:
    """Check that the largest bundle fits into what exports may hold of dram."""
    shares = {settings.object.share, *(tenant.share for tenant in settings.tenants.values())}
    options, capacity = PlannerOptions(), settings.tiers.dram.capacity_bytes
    if not settings.object.url or shares <= {"off", None}:
        return
    if options.max_export_fraction * capacity >= TARGET_BYTES:
        return
    most = format_bytes(int(options.max_export_fraction * capacity))
    enough = format_bytes(int(TARGET_BYTES / options.max_export_fraction))
    what = (
        f"exports hold at most {most} of dram: no larger bundle is stored, and some models have larger ones"
    )
    yield warn("object store", what, f"{enough} or more is enough for each model", "tiers.dram.capacity")


def check_quotas(facts: Facts, settings: Settings) -> Iterator[Check]:
    """Check that quotas fit into their tiers, and are enough to store something."""
    tiers, owners = settings.tiers, [name for name, t in settings.tenants.items() if t.sharing == "tenant"]
    ladder, sizes = tiers.ladder, tiers.sizes
    for tier in ladder.tiers:
        capacity = sizes[tier].capacity_bytes if tier in sizes else 0
        given = {name: settings.tenants[name].quota.by_tier.get(tier.label) for name in owners}
        quotas = {name: num_bytes for name, num_bytes in given.items() if num_bytes is not None}
        for name, num_bytes in quotas.items():
            setting, extent = f"tenants.{name}.quota.{tier.label}", tiers.dram.extent_bytes
            if tier != ladder.log_tier and num_bytes < extent:
                what = f"{format_bytes(num_bytes)} is less than one extent: it can store nothing there"
                yield warn("tenants", what, f"write {format_bytes(extent)} or more", setting)
            if num_bytes > capacity:
                what = f"{format_bytes(num_bytes)} is more than the tier has, {format_bytes(capacity)}"
                yield warn("tenants", what, f"lower it, or raise tiers.{tier.label}.capacity", setting)
        if len(quotas) > 1 and sum(quotas.values()) > capacity >= max(quotas.values()):
            what = f"quotas of {tier.label} are {format_bytes(sum(quotas.values()))} together, the tier has "
            fix = "lower quotas, or raise the capacity: now tenants evict each other below their quotas"
            yield warn("tenants", f"{what}{format_bytes(capacity)}", fix, f"tiers.{tier.label}.capacity")
    domains = {tenant.domain(name) for name, tenant in settings.tenants.items()}
    if len(domains) > tiers.dram.num_extents:
        what = f"{tiers.dram.num_extents} extents for {len(domains)} tenants, and none is shared by two"
        fix = "raise tiers.dram.capacity, or lower tiers.dram.extent"
        yield warn("tenants", what, fix, "tiers.dram.capacity")


def check_tcp_address(address: str, access: Access) -> Check:
    """Return what a caller at a TCP address has to prove."""
    name = f"listen {address}"
    host = address.rpartition(":")[0].strip("[]")
    if access.tls is not None:
        proof = "a certificate" if access.tls.client_ca is not None else "a token"
        return ok(name, f"TLS, and every caller needs {proof}")
    if host in _LOOPBACK or host.startswith("127."):
        return ok(name, "no TLS, loopback: users of this machine")
    return warn(
        name,
        "without TLS: everyone with access to this port can read and drop blocks",
        "set access.tls, listen on unix:///..., or firewall the port",
        "access.insecure",
    )
