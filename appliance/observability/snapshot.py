"""Snapshot: the appliance at one moment as one plain value, for `kvtier top` and the page.

docs/web-api.md says what is in it and keeps its promise: fields are added, never changed. Names (session
ids, prefix hashes) are in it only for readers that may see them: through the admin API always, over HTTP,
where callers have no identity, only with `observe.names`. Others see numbers.
"""

import math
import time
from typing import Any

from ... import __version__
from ...tiers.ladder import Ladder
from ..core.capacity.archiving import ARCHIVE
from ..core.capacity.pressure import COPY_AHEAD, IDLE_COPY, SPILL
from ..core.catalog.story import Decision
from . import holdings
from .daemon_view import DaemonView
from .telemetry import UsageTotals

SCHEMA = 1
MAX_DECISIONS = 40
NAME_BYTES = 4  # of a block's hash: what `kvtier why block` needs at least

#: Decisions about a block in a tier of memory, which the word ends with; and about one in the put tier.
OF_MEMORY = ("evicted", SPILL, COPY_AHEAD, IDLE_COPY, ARCHIVE)
PREFETCHED = ("prefetch", "prefetch_used", "prefetch_late", "prefetch_wasted")


def tiers_of_decisions(ladder: Ladder) -> dict[str, str]:
    """Return the name of the tier that each decision is about which is shown, by its word in the story."""
    return {
        **{f"{what}_{tier.label}": tier.label for what in OF_MEMORY for tier in ladder.memory_tiers},
        **dict.fromkeys(PREFETCHED, ladder.put_tier.label),
        **{f"condemned_{tier.label}": tier.label for tier in ladder.tiers},
    }


class Snapshots:
    """Makes them."""

    def __init__(self, view: DaemonView) -> None:
        self._view = view
        self._tier_of = tiers_of_decisions(view.planner.core.ladder)
        self._words = frozenset(self._tier_of)

    def take(self, num_samples: int, with_names: bool) -> dict[str, Any]:
        """Return the appliance now, with the last `num_samples` samples of the past.

        Plain JSON values; no NaN.
        """
        view = self._view
        planner = view.planner
        statistics = planner.statistics()
        counters = statistics["counters"]
        return {
            "schema": SCHEMA,
            "version": __version__,
            "epoch": f"{view.epoch:016x}",
            "at": round(time.time(), 3),
            "uptime_s": round(view.uptime_s(), 3),
            "state": view.state(),
            "policy": {"generation": view.reloads().generation, **view.policy_names()},
            "tiers": self._tiers(statistics),
            "writes": view.writes(),
            "source": view.source_status(),
            "fleet": view.fleet.summary() if view.fleet is not None else None,
            "edges": self._edges(),
            "totals": {**asked(view.telemetry.total), "evicted": sum(view.events.num_removed.values())},
            "prefetch": {
                **{word: counters.get(f"prefetch_{word}", 0) for word in ("begun", "used", "late", "wasted")},
                "cancelled": counters.get("prefetch_cancelled", 0),
                "awaited_bytes": statistics["awaited_bytes"],
            },
            "codecs": [
                {
                    "name": codec.name,
                    "raw_bytes": codec.encoded_raw_bytes,
                    "stored_bytes": codec.encoded_stored_bytes,
                    "num_encoded": codec.num_encoded,
                    "num_decoded": codec.num_decoded,
                    "encode_s": round(codec.encode_s, 6),
                    "decode_s": round(codec.decode_s, 6),
                }
                for codec in view.codecs()
            ],
            "counts": {
                "blocks": statistics["num_blocks"],
                "namespaces": statistics["num_namespaces"],
                "clients": len(view.service.clients),
                "sessions": statistics["num_sessions"],
                "leases": statistics["num_leases"],
                "pins": statistics["num_pins"],
                "waiting": statistics["num_waiting"],
            },
            "sessions": self._sessions(with_names),
            "decisions": [
                self._decision(decision, with_names)
                for decision in planner.story.decisions(self._words, MAX_DECISIONS)
            ],
            "history": view.sampler.series(num_samples),
        }

    def _tiers(self, statistics: dict[str, Any]) -> list[dict[str, Any]]:
        view = self._view
        census = view.census.take()
        tiers = []
        for tier, numbers in statistics["tiers"].items():
            tiers.append(
                {
                    "tier": tier.label,
                    "backend": view.appliance.engines[tier].statistics().backend,
                    "is_offline": tier in view.planner.core.offline,
                    **numbers,
                    "bytes_by_urgency": census[tier],
                }
            )
        return tiers

    def _edges(self) -> list[dict[str, Any]]:
        rates = self._view.sampler.rates()
        return [
            {
                "source": edge.source,
                "target": edge.target,
                "bytes_per_s": round(rates.get(f"{edge.source}>{edge.target}", 0.0)),
                "bytes": edge.num_bytes,
                "num_copies": edge.num_copies,
                "num_failed": edge.num_failed,
                "num_in_flight": edge.num_in_flight,
                "num_queued": edge.num_queued,
                "bandwidth_bytes_per_s": round(edge.bandwidth_bytes_per_s),
                "latency_s": edge.latency_s,
                "p50_s": edge.seconds.quantile(0.5),
                "p99_s": edge.seconds.quantile(0.99),
            }
            for edge in self._view.edges()
        ]

    def _sessions(self, with_names: bool) -> dict[str, Any]:
        view = self._view
        now = view.clock()
        latest = []
        for session, place in holdings.latest(view.planner):
            entry = {
                "number": session.number,
                "urgency": session.urgency.name.lower(),
                "idle_s": round(max(0.0, now - session.last_active), 3),
                **place,
                **asked(view.telemetry.of(session.id)),
            }
            latest.append({"name": session.id, **entry} if with_names else entry)
        return {"by_urgency": holdings.by_urgency(view.planner), "latest": latest}

    def _decision(self, decision: Decision, with_names: bool) -> dict[str, Any]:
        line, verdict = decision.line, decision.line.verdict
        entry = {
            "at_s": round(line.at - self._view.started_at, 3),
            "what": line.what,
            "tier": self._tier_of[line.what],
            "num_blocks": decision.num_blocks,
            "why": line.why.partition("; price")[0],
            "price": number_or_none(verdict.price),
            "next_price": number_or_none(verdict.next_price),
        }
        if with_names and isinstance(line.subject, bytes):
            entry["block"] = line.subject[:NAME_BYTES].hex()
            entry["next_block"] = verdict.next_block[:NAME_BYTES].hex() or None
        return entry


def number_or_none(value: float) -> float | None:
    """Return a price as JSON can carry it."""
    return value if math.isfinite(value) else None


def asked(statistics: UsageTotals) -> dict[str, Any]:
    """Return the statistics of a session, or of all of them. asked = found + missed + declined."""
    return {
        "asked": statistics.num_asked,
        "found": {tier.label: statistics.found[tier] for tier in statistics.ladder.tiers},
        "missed": statistics.num_missed,
        "declined": statistics.num_declined,
        "hit_ratio": statistics.hit_ratio,
        "stored": statistics.num_stored,
        "read_bytes": statistics.read_bytes,
        "loaded_bytes": statistics.loaded_bytes,
        "stored_bytes": statistics.stored_bytes,
        "saved_s": round(statistics.saved_s, 6),
    }
