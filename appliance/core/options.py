"""PlannerOptions: every limit and default of the pure core, in one place.

Everything is bounded (invariant 8): beyond a limit the answer is RESOURCE_EXHAUSTED, never a longer queue.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias, get_args

from ...tiers.block import NamespaceIdentity, Tier, tenant_of
from .worth import SourcePrices

#: When blocks are copied into the cold store; ahead.py.
WriteMode: TypeAlias = Literal["spill", "idle", "through"]
#: Which blocks are stored in the source, for other hosts; exports.py.
ShareMode: TypeAlias = Literal["off", "worth", "eager"]
SHARE_MODES: Final[tuple[ShareMode, ...]] = get_args(ShareMode)  # the least first


@dataclass(frozen=True, slots=True)
class TenantQuota:
    """What one tenant may take of what all tenants share; quotas.py says how it is counted."""

    memory_bytes: Mapping[Tier, int] = field(default_factory=dict)  # tiers not in it have no limit
    pinned_bytes: int | None = None
    cold_bytes: int | None = None  # payload in the cold store


@dataclass(frozen=True, slots=True)
class PlannerOptions:
    """Limits and defaults. Immutable: a policy change makes a new one.

    Settings choose those that depend on a host or its runtimes (`Settings.planner_options`). The others bound
    memory and waiting far above what correct callers need: constants, which only the simulator varies.
    """

    max_blocks_per_request: int = 4096
    max_namespaces: int = 1024
    max_clients: int = 256
    max_sessions: int = 65_536
    #: Of all sessions, counted once for each: up to 0.1 KiB each. A session without blocks takes 1 KiB.
    max_session_blocks: int = 1 << 21
    #: From so many sessions on, silent ones of which the last block is gone are forgotten.
    many_sessions: int = 8192
    max_leases_per_client: int = 4096
    max_pinned_blocks: int = 1 << 20  # of all pins, counted once for each
    #: Share of a memory tier's capacity that leases of one client may hold, and pins of all tenants together.
    max_pinned_fraction: float = 0.5
    #: Puts that may wait for room at the same time.
    max_waiting_puts: int = 256
    #: Acquires that may wait for blocks which are not stored anywhere yet.
    max_expecting_acquires: int = 256

    lease_ttl_s: float = 30.0
    lease_ttl_max_s: float = 600.0
    pin_ttl_max_s: float = 7 * 24 * 3600.0
    #: After a lease's deadline, how long its holder may still release it before its slots are condemned.
    lease_grace_s: float = 2.0
    reservation_ttl_s: float = 10.0
    #: Longest time a put waits for room when its caller gave no deadline.
    put_wait_s: float = 5.0
    session_idle_s: float = 3600.0

    #: Share of a memory tier's capacity from which on its coldest blocks leave, and that of the put tier from
    #: which on what is put is copied down ahead.
    high_watermark: float = 0.95
    low_watermark: float = 0.80
    #: Bytes being spilled at one time, per tier: enough to fill a device queue, little enough to
    #: plan anew often.
    max_spill_bytes: int = 64 << 20
    #: When blocks are copied into the cold store, and how many bytes a day may be written to it for copies
    #: that could as well wait; None: any number.
    write: WriteMode = "idle"
    daily_write_bytes: int | None = None
    #: Free segments the cold store tries to keep ready.
    min_free_segments: int = 2
    #: Share of a segment that may be copied forward when it is reclaimed, and of the store that beginnings
    #: may take beyond that before any is freed (reclaim.py); the rest is dropped.
    max_forward_fraction: float = 0.25

    #: Bytes of prefetches in flight, and the share of the put tier that may be prefetched and not used yet.
    max_prefetch_bytes: int = 256 << 20
    max_prefetched_fraction: float = 0.25
    #: Share of the bandwidth of the edge from the log that prefetches may take.
    prefetch_bandwidth_fraction: float = 0.5
    #: How long a block that was brought up for an arrival or on request is expected to be used.
    prefetch_window_s: float = 60.0

    #: Which blocks are exported to the source, if there is one, and how many bytes a day; None: any number.
    share: ShareMode = "worth"
    daily_export_bytes: int | None = None
    #: Instead of `share`: by tenant, the first part of an isolation domain's name; and by the beginning of a
    #: namespace's digest or its model's, in hex. Of several that match the least counts.
    shares: Mapping[str, ShareMode] = field(default_factory=dict)
    namespace_shares: Mapping[str, ShareMode] = field(default_factory=dict)
    prices: SourcePrices = field(default_factory=SourcePrices)
    #: Bytes of exports in flight, which hold their blocks in memory, and their share of the put tier.
    max_export_bytes: int = 128 << 20
    max_export_fraction: float = 1 / 8
    #: Longest wait for the source, where it is not known what computing would take.
    fetch_wait_s: float = 10.0

    #: Tenants that are configured: limits of all together are divided among so many (shares.py).
    num_tenants: int = 0
    #: By tenant: the first part of an isolation domain's name.
    quotas: Mapping[str, TenantQuota] = field(default_factory=dict)

    #: Remembered requests per client for answering a retry like the first try.
    max_remembered_requests: int = 1024
    #: Lines of the story kept for all blocks and sessions together.
    max_story_lines: int = 50_000
    #: Assumed until measured: what one edge moves per second, and how long it takes to begin.
    default_bandwidth_bytes_per_s: float = 1e9
    default_latency_s: float = 1e-3

    def share_of(self, identity: NamespaceIdentity) -> ShareMode:
        """Return which blocks of a namespace are exported."""
        said = []
        if self.shares and (share := self.shares.get(tenant_of(identity.domain))):
            said.append(share)
        if self.namespace_shares:
            digests = identity.digest.hex(), identity.model_digest.hex()
            said += [
                share
                for digits, share in self.namespace_shares.items()
                if any(digest.startswith(digits) for digest in digests)
            ]
        return min(said, key=SHARE_MODES.index, default=self.share)
