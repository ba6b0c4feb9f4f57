"""Reads the values of metrics. One function per metric: from the view to (label values, value)."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import TypeAlias

from ... import __version__
from ..config import COMMON
from ..histogram import Histogram
from ..transfer.lanes import EdgeStatistics
from . import holdings
from .daemon_view import READY, DaemonView

Pairs: TypeAlias = Iterable[tuple[tuple[str, ...], float]]
Histograms: TypeAlias = Iterable[tuple[tuple[str, ...], Histogram]]

PREFETCH_OUTCOMES = ("used", "late", "wasted", "cancelled")
REFUSED = "refused_"
OTHER = "other:"  # tenants that no policy names


def number(key: str) -> Callable[[DaemonView], Pairs]:
    """Return a reader of one of the planner's statistics."""
    return lambda view: [((), view.statistics()[key])]


def tier(key: str) -> Callable[[DaemonView], Pairs]:
    """Return a reader of one of the planner's statistics of each tier."""
    return lambda view: [
        ((tier.label,), statistics[key]) for tier, statistics in view.statistics()["tiers"].items()
    ]


# ------------------------------------------------------------------------------------------ service


def build_info(view: DaemonView) -> Pairs:
    """Return 1, labelled with the version."""
    return [((__version__,), 1)]


def uptime(view: DaemonView) -> Pairs:
    """Return seconds since the start."""
    return [((), view.uptime_s())]


def ready(view: DaemonView) -> Pairs:
    """Return 1 while the daemon serves and makes progress, else 0."""
    return [((), view.state() == READY)]


def generation(view: DaemonView) -> Pairs:
    """Return the number of the policy in force."""
    return [((), view.reloads().generation)]


def reloads(view: DaemonView) -> Pairs:
    """Return how many policies were applied and refused."""
    status = view.reloads()
    return [(("applied",), status.num_applied), (("refused",), status.num_refused)]


def loop_late(view: DaemonView) -> Histograms:
    """Return the histogram of how late the event loop ran its timers."""
    return [((), view.loop_late)]


def rpc_seconds(view: DaemonView) -> Histograms:
    """Return the histograms of calls, by method, transport and code."""
    return sorted(view.call_latencies.histograms.items())


def refusals(view: DaemonView) -> Pairs:
    """Return how many calls were refused, by reason."""
    counters = view.counters()
    return [
        ((name.removeprefix(REFUSED).upper(),), count)
        for name, count in sorted(counters.items())
        if name.startswith(REFUSED)
    ]


# -------------------------------------------------------------------------------------------- tiers


def tier_bytes(view: DaemonView) -> Iterator[tuple[tuple[str, ...], float]]:
    """Yield the bytes of each tier by state: resident, reserved, condemned."""
    states = {"resident": "used_bytes", "reserved": "reserved_bytes", "condemned": "condemned_bytes"}
    for tier, statistics in view.statistics()["tiers"].items():
        for state, key in states.items():
            yield (tier.label, state), statistics[key]


def urgency_bytes(view: DaemonView) -> Pairs:
    """Return the bytes of each tier by urgency."""
    return [
        ((tier.label, name), num_bytes)
        for tier, classes in view.census.take().items()
        for name, num_bytes in classes.items()
    ]


def writes(key: str) -> Callable[[DaemonView], Pairs]:
    """Return a reader of what is written to the cold store; of nothing where there is none, or no limit."""

    def read(view: DaemonView) -> Pairs:
        found = view.writes()
        return [] if found is None or found[key] is None else [((), found[key])]

    return read


def tier_offline(view: DaemonView) -> Pairs:
    """Return 1 for each tier that was lost, else 0."""
    return [((tier.label,), tier in view.planner.core.offline) for tier in view.planner.rooms]


def evicted(view: DaemonView) -> Pairs:
    """Return how many blocks left each tier, by reason."""
    return [((tier.label, reason), n) for (tier, reason), n in sorted(view.events.num_removed.items())]


def corrupt(view: DaemonView) -> Pairs:
    """Return how many fragments of each tier failed verification."""
    return _by_tier(view, "condemned")


def scrubbed_bytes(view: DaemonView) -> Pairs:
    """Return how many bytes of each tier verification has read."""
    return [((tier.label,), one.num_bytes) for tier, one in view.scrubs.items()]


def scrub_passes(view: DaemonView) -> Pairs:
    """Return how often each tier was verified whole."""
    return [((tier.label,), one.num_passes) for tier, one in view.scrubs.items()]


def _by_tier(view: DaemonView, word: str) -> Pairs:
    counters = view.planner.story.counters
    return [((tier.label,), counters.get(f"{word}_{tier.label}", 0)) for tier in view.planner.rooms]


# -------------------------------------------------------------------------------------------- asked


def asked(view: DaemonView) -> Pairs:
    """Return how many blocks lookups asked for."""
    return [((), view.telemetry.total.num_asked)]


def lookup_blocks(view: DaemonView) -> Pairs:
    """Return the blocks of lookups by where they were found, missed or declined."""
    total = view.telemetry.total
    found = [((tier.label,), total.found[tier]) for tier in total.ladder.tiers]
    return [*found, (("missed",), total.num_missed), (("declined",), total.num_declined)]


def read_bytes(view: DaemonView) -> Pairs:
    """Return the bytes that clients read."""
    return [((), view.telemetry.total.read_bytes)]


def stored_blocks(view: DaemonView) -> Pairs:
    """Return how many blocks were stored."""
    return [((), view.telemetry.total.num_stored)]


def stored_bytes(view: DaemonView) -> Pairs:
    """Return the bytes that were stored."""
    return [((), view.telemetry.total.stored_bytes)]


def saved(view: DaemonView) -> Pairs:
    """Return the seconds of prefill that hits saved."""
    return [((), view.telemetry.total.saved_s)]


def prefetch_begun(view: DaemonView) -> Pairs:
    """Return how many blocks were prefetched."""
    return [((), view.planner.story.counters.get("prefetch_begun", 0))]


def prefetch_blocks(view: DaemonView) -> Pairs:
    """Return how many prefetched blocks were used, late, wasted or cancelled."""
    counters = view.planner.story.counters
    return [((outcome,), counters.get(f"prefetch_{outcome}", 0)) for outcome in PREFETCH_OUTCOMES]


# ------------------------------------------------------------------------------------------- copies


def copies(view: DaemonView) -> Iterator[tuple[tuple[str, ...], float]]:
    """Yield how many fragments each edge copied, and how many failed."""
    for edge in view.edges():
        yield (edge.source, edge.target, "landed"), edge.num_copies
        yield (edge.source, edge.target, "failed"), edge.num_failed


def copy_seconds(view: DaemonView) -> Histograms:
    """Return the histogram of copy times of each edge."""
    return [((edge.source, edge.target), edge.seconds) for edge in view.edges()]


def _edges(read: Callable[[EdgeStatistics], float]) -> Callable[[DaemonView], Pairs]:
    return lambda view: [((edge.source, edge.target), read(edge)) for edge in view.edges()]


copy_bytes = _edges(lambda edge: edge.num_bytes)


def tenant_copy_bytes(view: DaemonView) -> Iterator[tuple[tuple[str, ...], float]]:
    """Yield the bytes each tenant moved on each edge. A domain that no policy names is `other:`."""
    named = view.tenants()
    for edge in view.edges():
        found: Counter[str] = Counter()
        for tenant, num_bytes in edge.bytes_of_tenant.items():
            found[tenant if tenant in named else COMMON if not tenant else OTHER] += num_bytes
        for tenant, num_bytes in sorted(found.items()):
            yield (tenant, edge.source, edge.target), num_bytes


def nvme_failures(view: DaemonView) -> Pairs:
    """Return how often a record was not read or written, by cause."""
    return [((cause.value,), number) for cause, number in view.nvme_failures().items()]


def master_key_wraps(view: DaemonView) -> Pairs:
    """Return how many data keys each master key wraps."""
    uses = view.rotation.uses() if view.rotation is not None else []
    return [((use.id,), use.num_wrapped) for use in uses]


def master_key_file_refused(view: DaemonView) -> Pairs:
    """Return 1 while the file of master keys is refused, else 0."""
    return [((), view.rotation is not None and view.rotation.last_error != "")]


copies_in_flight = _edges(lambda edge: edge.num_in_flight)
copies_queued = _edges(lambda edge: edge.num_queued)
edge_bandwidth = _edges(lambda edge: edge.bandwidth_bytes_per_s)
edge_latency = _edges(lambda edge: edge.latency_s)


def codec_fragments(view: DaemonView) -> Iterator[tuple[tuple[str, ...], float]]:
    """Yield how many fragments each codec encoded, decoded and refused."""
    for codec in view.codecs():
        yield (codec.name, "encoded"), codec.num_encoded
        yield (codec.name, "unfit"), codec.num_unfit
        yield (codec.name, "decoded"), codec.num_decoded
        yield (codec.name, "refused"), codec.num_refused
        yield (codec.name, "unreadable"), codec.num_unreadable


def codec_bytes(view: DaemonView) -> Iterator[tuple[tuple[str, ...], float]]:
    """Yield the bytes each codec was given and made."""
    for codec in view.codecs():
        yield (codec.name, "raw"), codec.encoded_raw_bytes
        yield (codec.name, "stored"), codec.encoded_stored_bytes


def codec_seconds(view: DaemonView) -> Iterator[tuple[tuple[str, ...], float]]:
    """Yield the seconds each codec took."""
    for codec in view.codecs():
        yield (codec.name, "encode"), codec.encode_s
        yield (codec.name, "decode"), codec.decode_s


# ------------------------------------------------------------------------------------- object store


def hosts(view: DaemonView) -> Pairs:
    """Return the other hosts by state."""
    states = [host["state"] for host in view.hosts()]
    return [((state,), states.count(state)) for state in ("live", "down")] if view.fleet is not None else []


def _peer_counters(prefix: str) -> Callable[[DaemonView], Pairs]:
    """Return a reader of the fleet's counters that begin with `prefix`, by the rest of their name."""
    return lambda view: [
        ((name.removeprefix(prefix),), number)
        for name, number in sorted((view.fleet.counters if view.fleet is not None else {}).items())
        if name.startswith(prefix)
    ]


peer_fetches = _peer_counters("fetches_")
peer_tickets = _peer_counters("tickets_")
peer_bytes = _peer_counters("bytes_")
directory_events = _peer_counters("directory_")
index_events = _peer_counters("index_")


def directory_up(view: DaemonView) -> Pairs:
    """Return 1 where the directory answers and takes this host, else 0; nothing without a directory."""
    return [] if (status := view.directory_status()) is None else [((), float(not status["problem"]))]


def index_up(view: DaemonView) -> Pairs:
    """Return 1 where the index is asked and takes what this host holds, else 0; nothing without an index."""
    status = view.directory_status()
    return [((), float(status["is_index_up"]))] if status is not None and status["has_index"] else []


def source(key: str) -> Callable[[DaemonView], Pairs]:
    """Return a reader of one number of SourceStatus; of nothing without an object store."""
    return lambda view: [] if (status := view.source_status()) is None else [((), status[key])]


def _by_word(key: str) -> Callable[[DaemonView], Pairs]:
    """Return a reader of one map of SourceStatus."""
    return lambda view: [
        ((word,), number) for word, number in (view.source_status() or {key: {}})[key].items()
    ]


source_fetches = _by_word("fetches")
source_exports = _by_word("exports")
source_day_dollars = _by_word("day_dollars")


def source_requests(view: DaemonView) -> Pairs:
    """Return the requests to the object store by operation and outcome."""
    status = view.source_status() or {"requests": []}
    return [((one["operation"], one["outcome"]), one["num"]) for one in status["requests"]]


def source_bytes(view: DaemonView) -> Pairs:
    """Return the bytes sent to and received from the object store."""
    status = view.source_status()
    directions = ("sent", "received") if status is not None else ()
    return [((direction,), (status or {})[f"{direction}_bytes"]) for direction in directions]


def source_request_seconds(view: DaemonView) -> Pairs:
    """Return the seconds of requests to the object store by operation."""
    seconds = view.source.status().usage.seconds() if view.source is not None else {}
    return [((operation,), took_s) for operation, took_s in sorted(seconds.items())]


def source_seconds(view: DaemonView) -> Histograms:
    """Return the histograms of searches, fetches and exports."""
    return (
        [] if view.source is None else [((word,), one) for word, one in view.source.status().seconds.items()]
    )


# --------------------------------------------------------------------------------------------- held


def sessions(view: DaemonView) -> Pairs:
    """Return the number of sessions of each urgency."""
    return [((urgency,), count) for urgency, count in holdings.by_urgency(view.planner).items()]


def clients(view: DaemonView) -> Pairs:
    """Return the number of clients."""
    return [((), view.num_clients())]


def leases_expired(view: DaemonView) -> Pairs:
    """Return how many leases ended at their deadline."""
    return [((), view.planner.story.counters.get("leases_expired", 0))]
