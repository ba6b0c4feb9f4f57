"""Swarm configurations: every seed draws its own limits, sizes, mixes of operations and fault rates.

Small numbers find big bugs: with two to sixteen slots every put evicts, with a ring of a few records every
spill reclaims. Rates are drawn per seed and often zero, because a fault that always happens hides the defects
that need it to be absent.
"""

from dataclasses import dataclass, field
from random import Random

from kvtier.appliance.core.encodings import Compression, Encoding, NoCompression
from kvtier.appliance.core.options import PlannerOptions
from kvtier.policies.costs import PrefillModel
from kvtier.policies.registry import EVICTION, PREFETCH, PolicyChoice
from kvtier.tiers.block import Geometry, NamespaceIdentity
from kvtier.tiers.codecs.base import PROFILED_ID

SENSELESS_EVICTION = "tests.sim.policies:SenselessEviction"
SENSELESS_PREFETCH = "tests.sim.expectations:SenselessPrefetch"
SENSELESS_ADMISSION = "tests.sim.policies:SenselessAdmission"
SLOT_BYTES = 16 << 10
FOOTER_BYTES = 4096

#: What clients do, with the weight before swarming.
OPERATIONS = {
    "put": 30,
    "reserve": 12,
    "acquire": 30,
    "one_sided": 12,
    "lookup": 3,
    "keep_alive": 2,
    "touch": 2,
    "pin": 2,
    "unpin": 2,
    "prefetch": 4,
    "session": 4,
    "fork": 1,
    "end": 2,
    "evict": 1,
    "die": 1.5,
    "trespass": 0.5,
    "jump": 0.3,
    "crash": 0.6,
    "drain": 0.3,
    "tier_lost": 0.6,
    "measure": 2,
}

#: Faults and the highest rate a seed may draw; per copy item, write or read unless said otherwise.
FAULTS = {
    "write_error": 0.08,
    "short_write": 0.05,
    "torn_write": 0.05,  # reported as failed, but half a record stands there
    "read_error": 0.08,
    "dma_error": 0.06,
    "latency_spike": 0.05,  # per copy
    "hang": 0.02,  # per copy from or to nvme
    "late_completion": 0.2,  # per copy: it ended long before we hear of it
    "seal_error": 0.1,  # per segment
    "no_place": 0.05,  # per reservation in a room: the allocator fails although there is room
    "staging_changed": 0.05,  # per put
    "does_not_fit": 0.5,  # per encoded record
    "retry": 0.25,  # per request: sent again with the same id
    "late_retry": 0.1,  # per request: arrives again long after its answer
    "never_released": 0.1,  # per lease of a local client
    "released_twice": 0.1,  # per lease
}
#: Lies of the medium. Only verification can see them, so they are left out where nothing is verified.
MEDIA_FAULTS = {"misdirected_write": 0.03, "bit_rot": 0.05, "stale_read": 0.03}


@dataclass(frozen=True, slots=True)
class SimCompression:
    """Encodes as much as `share` says; every other layer group stays as it is when `is_mixed`."""

    codec_id: int
    share: float
    is_mixed: bool

    def encodings_of(self, identity: NamespaceIdentity) -> tuple[Encoding | None, ...]:
        """See Compression."""
        return self._encodings(identity, self.codec_id)

    def exact_encodings_of(self, identity: NamespaceIdentity) -> tuple[Encoding | None, ...]:
        """See Compression."""
        return self._encodings(identity, 1)

    def _encodings(self, identity: NamespaceIdentity, codec_id: int) -> tuple[Encoding | None, ...]:
        geometry = identity.geometry
        return tuple(
            None
            if self.is_mixed and group % 2
            else Encoding(codec_id, max(1, int(geometry.fragment_bytes[group] * self.share)))
            for group in range(geometry.num_groups)
        )


def draw_compression(rng: Random) -> Compression:
    """Draw how fragments enter the cold store."""
    if rng.random() < 0.5:
        return NoCompression()
    return SimCompression(rng.choice((1, 2, PROFILED_ID)), rng.choice((0.05, 0.4, 0.73)), rng.random() < 0.3)


@dataclass(slots=True)
class Config:
    """What one seed drew."""

    verify: bool
    num_operations: int
    options: PlannerOptions
    geometries: list[Geometry]
    num_domains: int
    domain_of_namespace: list[int]
    dram_extents: int
    slots_per_extent: int
    hbm_extents: int  # 0: no hbm
    hbm_is_shared: bool  # False: a GPU's, which only readers on the device can read
    num_segments: int  # 0: no nvme
    segment_records: int
    num_clients: int
    remote_fraction: float
    silent_ttl_s: float | None
    num_keys: int
    num_sessions: int
    step_s: float  # mean time between operations
    memory_copy_s: float
    nvme_copy_s: float
    rates: dict[str, float] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)
    policies: PolicyChoice = field(default_factory=PolicyChoice)
    prefill_speeds: list[PrefillModel | None] = field(default_factory=list)  # by namespace
    hint_rate: float = 0.0  # of puts, acquires and session updates: says more than it must
    compression: Compression = field(default_factory=NoCompression)
    min_run: int = 1  # blocks of a put that are admitted and landed in columns
    straight_codecs: frozenset[int] = frozenset()  # whose records reach a GPU's hbm without a stop
    cxl_extents: int = 0  # of a second memory tier; 0: there is none
    audit_every: int = 64


def draw(rng: Random, verify: bool, num_operations: int = 0) -> Config:
    """Draw the configuration of a seed. Both modes of a seed draw the same one but for the media faults."""
    num_namespaces = rng.choice((1, 1, 2, 3))
    geometries = []
    for _ in range(num_namespaces):
        layers_per_group = rng.choice((1, 2, 4, 4, 5))
        num_groups = rng.choice((1, 1, 2, 3))
        geometries.append(
            Geometry(layers_per_group * num_groups, 1, 64, 16, "float16", layers_per_group=layers_per_group)
        )
    num_domains = rng.choice((1, 1, 2))
    slots_per_extent = rng.choice((2, 2, 3, 4))
    has_nvme = rng.random() < 0.85
    num_segments = rng.choice((2, 3, 4, 8))
    options = PlannerOptions(
        max_blocks_per_request=rng.choice((8, 64, 4096)),
        max_leases_per_client=rng.choice((2, 8, 4096)),
        max_pinned_fraction=rng.choice((0.25, 0.5, 1.0)),
        max_waiting_puts=rng.choice((1, 2, 16)),
        max_sessions=rng.choice((2, 64)),
        many_sessions=4,
        lease_ttl_s=rng.choice((0.02, 0.2, 5.0)),
        lease_grace_s=rng.choice((0.0, 0.02, 0.2)),
        reservation_ttl_s=rng.choice((0.02, 0.2, 1.0)),
        put_wait_s=rng.choice((0.005, 0.1, 0.5)),
        high_watermark=rng.choice((0.5, 0.75, 0.9, 1.0)),
        low_watermark=rng.choice((0.25, 0.5)),
        max_spill_bytes=rng.choice((SLOT_BYTES, 4 * SLOT_BYTES, 64 << 20)),
        min_free_segments=1 if num_segments < 4 else rng.choice((1, 2)),
        max_forward_fraction=rng.choice((0.0, 0.25, 0.5)),
        max_remembered_requests=rng.choice((1, 1024)),
        max_story_lines=200,
        max_prefetch_bytes=rng.choice((SLOT_BYTES, 4 * SLOT_BYTES, 64 << 20)),
        max_prefetched_fraction=rng.choice((0.1, 0.25, 1.0)),
        prefetch_bandwidth_fraction=rng.choice((1e-4, 0.5)),
        prefetch_window_s=rng.choice((0.0, 0.01, 1.0)),
    )
    rates = {name: rng.random() ** 2 * top * (rng.random() < 0.4) for name, top in FAULTS.items()}
    media = {name: rng.random() ** 2 * top * (rng.random() < 0.4) for name, top in MEDIA_FAULTS.items()}
    rates |= media if verify else dict.fromkeys(media, 0.0)
    weights = {name: weight * rng.choice((0, 0.5, 1, 1, 3)) for name, weight in OPERATIONS.items()}
    weights["put"] += 5
    weights["acquire"] += 5
    return Config(
        verify=verify,
        num_operations=num_operations or rng.choice((20, 50, 80)),
        options=options,
        geometries=geometries,
        num_domains=num_domains,
        domain_of_namespace=[rng.randrange(num_domains) for _ in geometries],
        dram_extents=rng.choice((1, 2, 2, 4)),
        slots_per_extent=slots_per_extent,
        hbm_extents=rng.choice((0, 0, 1, 2)),
        hbm_is_shared=rng.random() < 0.5,
        num_segments=num_segments if has_nvme else 0,
        segment_records=rng.choice((2, 3, 6)),
        num_clients=rng.choice((1, 2, 4)),
        remote_fraction=rng.choice((0.0, 0.3, 1.0)),
        silent_ttl_s=rng.choice((None, 0.1, 2.0)),
        num_keys=rng.choice((4, 8, 16, 60)),
        num_sessions=rng.choice((1, 3, 5)),
        step_s=rng.choice((0.0005, 0.002, 0.01)),
        memory_copy_s=rng.choice((0.0001, 0.001)),
        nvme_copy_s=rng.choice((0.0002, 0.002, 0.02)),
        rates=rates,
        weights=weights,
        min_run=rng.choice((1, 3, 6)),
        policies=_draw_policies(rng),
        prefill_speeds=[rng.choice((None, None, PrefillModel(1e9), PrefillModel(1e4))) for _ in geometries],
        hint_rate=rng.choice((0.0, 0.2, 0.7)),
        compression=draw_compression(rng),
        straight_codecs=rng.choice((frozenset(), frozenset({0}), frozenset({0, 1, 2, PROFILED_ID}))),
        cxl_extents=rng.choice((0, 0, 1, 2, 4)),
    )


def _draw_policies(rng: Random) -> PolicyChoice:
    """Half of the seeds run policies without sense: they try what sensible ones never do."""
    real = sorted(set(EVICTION) - {"clairvoyant"})
    return PolicyChoice(
        eviction=rng.choice((SENSELESS_EVICTION, rng.choice(real))),
        admission=rng.choice(("all", SENSELESS_ADMISSION)),
        prefetch=rng.choice(("", SENSELESS_PREFETCH, SENSELESS_PREFETCH, *sorted(PREFETCH))),
        options={
            SENSELESS_PREFETCH: {"seed": rng.randrange(1 << 30), "mean_pause_s": rng.choice((0.001, 0.05))}
        },
        allowed_modules=("tests.sim",),
    )
