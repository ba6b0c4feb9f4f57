"""Where metrics are read. One function per metric: from the eyes to (label values, value)."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import TypeAlias

from ... import __version__
from ...tiers.block import Tier
from ..config import COMMON
from ..histogram import Histogram
from ..transfer.lanes import EdgeStatistics
from . import holdings
from .daemon_view import READY, Eyes

Pairs: TypeAlias = Iterable[tuple[tuple[str, ...], float]]
Histograms: TypeAlias = Iterable[tuple[tuple[str, ...], Histogram]]

PREFETCH_OUTCOMES = ("used", "late", "wasted", "cancelled")
REFUSED = "refused_"
OTHER = "other:"  # tenants that no policy names


def number(key: str) -> Callable[[Eyes], Pairs]:
    """Return a reader of one of the planner's statistics."""
    return lambda eyes: [((), eyes.statistics()[key])]


def tier(key: str) -> Callable[[Eyes], Pairs]:
    """Return a reader of one of the planner's statistics of each tier."""
    return lambda eyes: [((tier.label,), books[key]) for tier, books in eyes.statistics()["tiers"].items()]


# ------------------------------------------------------------------------------------------ service


def build_info(eyes: Eyes) -> Pairs:
    return [((__version__,), 1)]


def uptime(eyes: Eyes) -> Pairs:
    return [((), eyes.uptime_s())]


def ready(eyes: Eyes) -> Pairs:
    return [((), eyes.state() == READY)]


def generation(eyes: Eyes) -> Pairs:
    return [((), eyes.reloads().generation)]


def reloads(eyes: Eyes) -> Pairs:
    status = eyes.reloads()
    return [(("applied",), status.num_applied), (("refused",), status.num_refused)]


def loop_late(eyes: Eyes) -> Histograms:
    return [((), eyes.loop_late)]


def rpc_seconds(eyes: Eyes) -> Histograms:
    return sorted(eyes.rpcs.histograms.items())


def refusals(eyes: Eyes) -> Pairs:
    counters = eyes.counters()
    return [
        ((name.removeprefix(REFUSED).upper(),), count)
        for name, count in sorted(counters.items())
        if name.startswith(REFUSED)
    ]


# -------------------------------------------------------------------------------------------- tiers


def tier_bytes(eyes: Eyes) -> Iterator[tuple[tuple[str, ...], float]]:
    states = {"resident": "used_bytes", "reserved": "reserved_bytes", "condemned": "condemned_bytes"}
    for tier, books in eyes.statistics()["tiers"].items():
        for state, key in states.items():
            yield (tier.label, state), books[key]


def urgency_bytes(eyes: Eyes) -> Pairs:
    return [
        ((tier.label, name), num_bytes)
        for tier, classes in eyes.census.take().items()
        for name, num_bytes in classes.items()
    ]


def writes(key: str) -> Callable[[Eyes], Pairs]:
    """Return a reader of what is written to the cold store; of nothing where there is none, or no limit."""

    def read(eyes: Eyes) -> Pairs:
        found = eyes.writes()
        return [] if found is None or found[key] is None else [((), found[key])]

    return read


def tier_offline(eyes: Eyes) -> Pairs:
    return [((tier.label,), tier in eyes.planner.core.offline) for tier in eyes.planner.rooms]


def evicted(eyes: Eyes) -> Pairs:
    return [((tier.label, reason), n) for (tier, reason), n in sorted(eyes.events.num_removed.items())]


def corrupt(eyes: Eyes) -> Pairs:
    return _by_tier(eyes, "condemned")


def _by_tier(eyes: Eyes, word: str) -> Pairs:
    counters = eyes.planner.story.counters
    return [((tier.label,), counters.get(f"{word}_{tier.label}", 0)) for tier in eyes.planner.rooms]


# -------------------------------------------------------------------------------------------- asked


def asked(eyes: Eyes) -> Pairs:
    return [((), eyes.telemetry.total.num_asked)]


def lookup_blocks(eyes: Eyes) -> Pairs:
    total = eyes.telemetry.total
    found = [((tier.label,), total.found[tier]) for tier in (Tier.HBM, Tier.DRAM, Tier.NVME)]
    return [*found, (("missed",), total.num_missed), (("declined",), total.num_declined)]


def read_bytes(eyes: Eyes) -> Pairs:
    return [((), eyes.telemetry.total.read_bytes)]


def stored_blocks(eyes: Eyes) -> Pairs:
    return [((), eyes.telemetry.total.num_stored)]


def stored_bytes(eyes: Eyes) -> Pairs:
    return [((), eyes.telemetry.total.stored_bytes)]


def saved(eyes: Eyes) -> Pairs:
    return [((), eyes.telemetry.total.saved_s)]


def prefetch_begun(eyes: Eyes) -> Pairs:
    return [((), eyes.planner.story.counters.get("prefetch_begun", 0))]


def prefetch_blocks(eyes: Eyes) -> Pairs:
    counters = eyes.planner.story.counters
    return [((outcome,), counters.get(f"prefetch_{outcome}", 0)) for outcome in PREFETCH_OUTCOMES]


# ------------------------------------------------------------------------------------------- copies


def copies(eyes: Eyes) -> Iterator[tuple[tuple[str, ...], float]]:
    for edge in eyes.edges():
        yield (edge.source, edge.target, "landed"), edge.num_copies
        yield (edge.source, edge.target, "failed"), edge.num_failed


def copy_seconds(eyes: Eyes) -> Histograms:
    return [((edge.source, edge.target), edge.seconds) for edge in eyes.edges()]


def _edges(read: Callable[[EdgeStatistics], float]) -> Callable[[Eyes], Pairs]:
    return lambda eyes: [((edge.source, edge.target), read(edge)) for edge in eyes.edges()]


copy_bytes = _edges(lambda edge: edge.num_bytes)


def tenant_copy_bytes(eyes: Eyes) -> Iterator[tuple[tuple[str, ...], float]]:
    """Nobody but an administrator names a tenant here: a domain that a client made up is `other:`."""
    named = eyes.tenants()
    for edge in eyes.edges():
        found: Counter[str] = Counter()
        for tenant, num_bytes in edge.bytes_of_tenant.items():
            found[tenant if tenant in named else COMMON if not tenant else OTHER] += num_bytes
        for tenant, num_bytes in sorted(found.items()):
            yield (tenant, edge.source, edge.target), num_bytes


def nvme_failures(eyes: Eyes) -> Pairs:
    return [((cause.value,), number) for cause, number in eyes.nvme_failures().items()]


def master_key_wraps(eyes: Eyes) -> Pairs:
    uses = eyes.rotation.uses() if eyes.rotation is not None else []
    return [((use.id,), use.num_wrapped) for use in uses]


def master_key_file_refused(eyes: Eyes) -> Pairs:
    return [((), eyes.rotation is not None and eyes.rotation.last_error != "")]


copies_in_flight = _edges(lambda edge: edge.num_in_flight)
copies_queued = _edges(lambda edge: edge.num_queued)
edge_bandwidth = _edges(lambda edge: edge.bandwidth_bytes_per_s)
edge_latency = _edges(lambda edge: edge.latency_s)


def codec_fragments(eyes: Eyes) -> Iterator[tuple[tuple[str, ...], float]]:
    for codec in eyes.codecs():
        yield (codec.name, "encoded"), codec.num_encoded
        yield (codec.name, "unfit"), codec.num_unfit
        yield (codec.name, "decoded"), codec.num_decoded
        yield (codec.name, "refused"), codec.num_refused
        yield (codec.name, "unreadable"), codec.num_unreadable


def codec_bytes(eyes: Eyes) -> Iterator[tuple[tuple[str, ...], float]]:
    for codec in eyes.codecs():
        yield (codec.name, "raw"), codec.encoded_raw_bytes
        yield (codec.name, "stored"), codec.encoded_stored_bytes


def codec_seconds(eyes: Eyes) -> Iterator[tuple[tuple[str, ...], float]]:
    for codec in eyes.codecs():
        yield (codec.name, "encode"), codec.encode_s
        yield (codec.name, "decode"), codec.decode_s


# --------------------------------------------------------------------------------------------- held


def sessions(eyes: Eyes) -> Pairs:
    return [((urgency,), count) for urgency, count in holdings.by_urgency(eyes.planner).items()]


def clients(eyes: Eyes) -> Pairs:
    return [((), eyes.num_clients())]


def leases_expired(eyes: Eyes) -> Pairs:
    return [((), eyes.planner.story.counters.get("leases_expired", 0))]
