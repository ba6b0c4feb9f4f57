"""Reads the values of metrics: one reader for each row of metrics_table.py, which says what it is."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

from ... import __version__
from ..config import COMMON
from ..counters import of_prefix
from . import holdings
from .daemon_view import READY, DaemonView
from .metrics import Reading, Value

Reader: TypeAlias = Callable[[DaemonView], Reading]

PREFETCH_OUTCOMES = ("used", "late", "wasted", "cancelled")
OTHER = "other:"  # tenants that no policy names


def one(read: Callable[[DaemonView], Value]) -> Reader:
    """Return a reader of one number without labels."""
    return lambda view: [((), read(view))]


def by(read: Callable[[DaemonView], Mapping[Any, Value]]) -> Reader:
    """Return a reader of several values, by their label or a tuple of labels."""
    return lambda view: [
        (key if isinstance(key, tuple) else (key,), value) for key, value in read(view).items()
    ]


def number(key: str) -> Reader:
    """Return a reader of one of the planner's statistics."""
    return one(lambda view: view.planner.statistics()[key])


def total(field: str) -> Reader:
    """Return a reader of one number of what all requests asked for, found and stored."""
    return one(lambda view: getattr(view.telemetry.total, field))


def counter(name: str) -> Reader:
    """Return a reader of one of the planner's counters."""
    return one(lambda view: view.planner.story.counters.get(name, 0))


def tier(key: str) -> Reader:
    """Return a reader of one of the planner's statistics of each tier."""
    return by(
        lambda view: {t.label: numbers[key] for t, numbers in view.planner.statistics()["tiers"].items()}
    )


def edge(field: str) -> Reader:
    """Return a reader of one number of each edge."""
    return by(lambda view: {(one.source, one.target): getattr(one, field) for one in view.edges()})


def scrub(field: str) -> Reader:
    """Return a reader of one number of the verification of each tier."""
    return by(lambda view: {tier.label: getattr(one, field) for tier, one in view.scrubs.items()})


def optional(status: Callable[[DaemonView], Mapping[str, Any] | None], key: str) -> Reader:
    """Return a reader of one number of a status; of nothing where that has none, or is not there."""

    def read(view: DaemonView) -> Reading:
        found = status(view)
        return [] if found is None or found[key] is None else [((), found[key])]

    return read


def writes(key: str) -> Reader:
    """Return a reader of what is written to the cold store."""
    return optional(DaemonView.writes, key)


def source(key: str) -> Reader:
    """Return a reader of one number of SourceStatus."""
    return optional(DaemonView.source_status, key)


def source_words(key: str) -> Reader:
    """Return a reader of one map of SourceStatus."""
    return by(lambda view: (view.source_status() or {key: {}})[key])


def peers(prefix: str) -> Reader:
    """Return a reader of the fleet's counters that begin with `prefix`, by the rest of their name."""
    return by(lambda view: of_prefix(view.fleet.counters if view.fleet is not None else {}, prefix))


# ------------------------------------------------------------------------------------------ service


build_info = by(lambda view: {__version__: 1})
uptime = one(DaemonView.uptime_s)
ready = one(lambda view: view.state() == READY)
generation = one(lambda view: view.reloads().generation)
policy_refused = one(lambda view: view.reloads().last_error != "")
tls_ends = by(lambda view: view.tls_ends)
reloads = by(lambda view: {"applied": view.reloads().num_applied, "refused": view.reloads().num_refused})
loop_late = one(lambda view: view.loop_late)
rpc_seconds = by(lambda view: dict(sorted(view.call_latencies.histograms.items())))
refusals = by(lambda view: {k.upper(): count for k, count in of_prefix(view.counters(), "refused_").items()})

# -------------------------------------------------------------------------------------------- tiers

tier_bytes = by(
    lambda view: {
        (tier.label, state): statistics[key]
        for tier, statistics in view.planner.statistics()["tiers"].items()
        for state, key in (
            ("resident", "used_bytes"),
            ("reserved", "reserved_bytes"),
            ("condemned", "condemned_bytes"),
        )
    }
)
urgency_bytes = by(
    lambda view: {
        (tier.label, name): num_bytes
        for tier, classes in view.census.take().items()
        for name, num_bytes in classes.items()
    }
)
tier_offline = by(lambda view: {tier.label: tier in view.planner.core.offline for tier in view.planner.rooms})
evicted = by(
    lambda view: {(tier.label, reason): n for (tier, reason), n in sorted(view.events.num_removed.items())}
)
corrupt = by(
    lambda view: {
        tier.label: view.planner.story.counters.get(f"condemned_{tier.label}", 0)
        for tier in view.planner.rooms
    }
)

# -------------------------------------------------------------------------------------------- asked

lookup_blocks = by(
    lambda view: {
        **{tier.label: view.telemetry.total.found[tier] for tier in view.telemetry.total.ladder.tiers},
        "missed": view.telemetry.total.num_missed,
        "declined": view.telemetry.total.num_declined,
    }
)
prefetch_blocks = by(
    lambda view: {
        outcome: view.planner.story.counters.get(f"prefetch_{outcome}", 0) for outcome in PREFETCH_OUTCOMES
    }
)

# ------------------------------------------------------------------------------------------- copies


def copies(view: DaemonView) -> Iterator[tuple[tuple[str, ...], float]]:
    """Yield how many fragments each edge copied, and how many failed."""
    for edge in view.edges():
        yield (edge.source, edge.target, "landed"), edge.num_copies
        yield (edge.source, edge.target, "failed"), edge.num_failed


def tenant_copy_bytes(view: DaemonView) -> Iterator[tuple[tuple[str, ...], float]]:
    """Yield the bytes each tenant moved on each edge. A domain that no policy names is `other:`."""
    named = view.tenants()
    for edge in view.edges():
        found: Counter[str] = Counter()
        for tenant, num_bytes in edge.bytes_of_tenant.items():
            found[tenant if tenant in named else COMMON if not tenant else OTHER] += num_bytes
        for tenant, num_bytes in sorted(found.items()):
            yield (tenant, edge.source, edge.target), num_bytes


nvme_failures = by(lambda view: {cause.value: count for cause, count in view.nvme_failures().items()})
master_key_wraps = by(
    lambda view: {use.id: use.num_wrapped for use in (view.rotation.uses() if view.rotation else [])}
)
master_key_file_refused = one(lambda view: view.rotation is not None and view.rotation.last_error != "")


def codec(**fields: str) -> Reader:
    """Return a reader of fields of each codec, by the codec's name and the field's label."""
    return by(
        lambda view: {
            (one.name, label): getattr(one, field) for one in view.codecs() for label, field in fields.items()
        }
    )


# ---------------------------------------------------------------------- object store and other hosts


def hosts(view: DaemonView) -> Reading:
    """Return the other hosts by state."""
    states = [host["state"] for host in view.hosts()]
    return [((state,), states.count(state)) for state in ("live", "down")] if view.fleet is not None else []


def directory_up(view: DaemonView) -> Reading:
    """Return 1 where the directory answers and takes this host, else 0; nothing without a directory."""
    return [] if (status := view.directory_status()) is None else [((), float(not status["problem"]))]


def index_up(view: DaemonView) -> Reading:
    """Return 1 where the index is asked and takes what this host holds, else 0; nothing without an index."""
    status = view.directory_status()
    return [((), float(status["is_index_up"]))] if status is not None and status["has_index"] else []


source_requests = by(
    lambda view: {
        (one["operation"], one["outcome"]): one["num"]
        for one in (view.source_status() or {"requests": []})["requests"]
    }
)
source_bytes = by(
    lambda view: {
        direction: status[f"{direction}_bytes"]
        for status in filter(None, [view.source_status()])
        for direction in ("sent", "received")
    }
)
source_request_seconds = by(
    lambda view: dict(sorted(view.source.status().usage.seconds().items())) if view.source else {}
)
source_seconds = by(lambda view: view.source.status().seconds if view.source else {})

# --------------------------------------------------------------------------------------------- held

sessions = by(lambda view: holdings.by_urgency(view.planner))
clients = one(lambda view: len(view.service.clients))
