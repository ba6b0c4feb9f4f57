"""The alert rules that come with kvtier: few, each with what to do.

An alert is for something a person should do; everything else is a panel. helm/kvtier/files/alerts.yaml is
generated from here (`make docs`); tests/appliance/observability/test_dashboard.py parses every expression
and checks every name, label and value in it.
"""

from dataclasses import dataclass

import yaml


@dataclass(frozen=True, slots=True)
class Alert:
    """One rule."""

    name: str
    expression: str
    lasts: str  # before it is told
    severity: str  # warning: look today; critical: look now
    summary: str
    todo: str


ALERTS = (
    Alert(
        "KvtierNotReady",
        "kvtier_ready == 0",
        "5m",
        "critical",
        "A node has served no calls for five minutes.",
        "Look at its log; a daemon that failed says why in the last lines. Runtimes recompute meanwhile.",
    ),
    Alert(
        "KvtierTierOffline",
        "kvtier_tier_offline == 1",
        "1m",
        "critical",
        "Tier {{ $labels.tier }} stopped working; the node goes on without it.",
        "Look at the device and the log. nvme comes back by itself once its metadata can be written; "
        "a lost hbm comes back with a restart of the daemon.",
    ),
    Alert(
        "KvtierCorruptFragments",
        "sum by (instance, tier) (increase(kvtier_corrupt_fragments_total[1h])) > 3",
        "0m",
        "warning",
        "Fragments failed verification in {{ $labels.tier }} and were dropped; they were never returned.",
        "Check the device's health (`smartctl`, `nvme smart-log`); replace it if the count grows.",
    ),
    Alert(
        "KvtierAboveWatermark",
        "sum by (instance, tier) (kvtier_tier_bytes) / "
        "sum by (instance, tier) (kvtier_tier_capacity_bytes) > 0.98 "
        'and on (instance) sum by (instance) (rate(kvtier_copy_bytes_total{target="nvme"}[10m])) > 0',
        "30m",
        "warning",
        "Tier {{ $labels.tier }} has been full for half an hour while spilling to nvme.",
        "Spilling does not keep up: raise the tier's capacity, or mend the device.",
    ),
    Alert(
        "KvtierPrefetchWaste",
        'sum by (instance) (rate(kvtier_prefetch_blocks_total{outcome="wasted"}[1h])) / '
        "sum by (instance) (rate(kvtier_prefetch_blocks_total[1h])) > 0.3 and "
        "sum by (instance) (rate(kvtier_prefetch_blocks_total[1h])) > 0.1",
        "1h",
        "warning",
        "Nearly a third of the prefetched blocks are never used.",
        "Choose another `policy.prefetch`; `kvtier replay` compares them.",
    ),
    Alert(
        "KvtierRefusals",
        "sum by (instance, reason) "
        '(rate(kvtier_refusals_total{reason=~"TIER_FULL|TOO_MANY_IN_FLIGHT"}[10m])) > 1',
        "15m",
        "warning",
        "Requests are refused for {{ $labels.reason }}: more than one a second for fifteen minutes.",
        "docs/api.md says which limit; raise it, or give the tier more room.",
    ),
    Alert(
        "KvtierPolicyRefused",
        'increase(kvtier_policy_reloads_total{outcome="refused"}[15m]) > 0',
        "0m",
        "warning",
        "A new policy was refused; the one before stays in force.",
        "`kvtier policy validate FILE` names line and fix; the daemon's log has the same sentence.",
    ),
    Alert(
        "KvtierMasterKeysRefused",
        "kvtier_master_key_file_refused == 1",
        "5m",
        "warning",
        "The file of master keys cannot be used as it is now; the keys read before still hold.",
        "Mend it before the next start, which would fail: `kvtier status` says which line is missing.",
    ),
    Alert(
        "KvtierSourceClosed",
        "kvtier_source_open == 0",
        "10m",
        "warning",
        "The object store has not answered for ten minutes; blocks of other hosts are computed here.",
        "`kvtier status` says why, `kvtier objects check` tries it. It is used again when it answers.",
    ),
    Alert(
        "KvtierSourceDamaged",
        "sum by (instance) "
        '(increase(kvtier_source_fetches_total{outcome=~"wrong_checksum|wrong_identity"}[1h])) > 3',
        "0m",
        "warning",
        "Objects of the store are damaged: fetches failed verification, and their blocks were computed.",
        "`kvtier objects verify` names them; delete them, and they are stored again when used.",
    ),
    Alert(
        "KvtierExportsOverBudget",
        'sum by (instance) (increase(kvtier_source_exports_total{outcome="over_budget"}[1h])) > 0',
        "1h",
        "warning",
        "The day's bytes for the object store are used up: nothing more is stored for other hosts.",
        "Raise `object.daily_exports`, or set `object.price`, so that only what pays is stored.",
    ),
    Alert(
        "KvtierDirectoryLost",
        "kvtier_directory_up == 0",
        "10m",
        "warning",
        "The directory of hosts does not answer, or does not take this host: new hosts are not found.",
        "`kvtier fleet` says why. Known hosts stay; blocks are computed where no host is known.",
    ),
    Alert(
        "KvtierIndexLost",
        "kvtier_index_up == 0",
        "10m",
        "warning",
        "The index does not answer, or takes nothing of this host: hosts compute what others hold.",
        "Most often Redis is slow, or full: raise its maxmemory (162 bytes a bundle). See `kvtier fleet`.",
    ),
    Alert(
        "KvtierLoopLate",
        "histogram_quantile(0.99, sum by (instance, le) (rate(kvtier_loop_late_seconds_bucket[10m]))) > 0.25",
        "15m",
        "warning",
        "The daemon's event loop is a quarter of a second late: every call waits that long.",
        "Give the daemon a core of its own; if it has one, file an issue with `kvtier status --json`.",
    ),
)


def alerts_yaml() -> str:
    """Return the rules as Prometheus loads them."""
    rules = [
        {
            "alert": alert.name,
            "expr": alert.expression,
            "for": alert.lasts,
            "labels": {"severity": alert.severity},
            "annotations": {"summary": alert.summary, "description": alert.todo},
        }
        for alert in ALERTS
    ]
    text = yaml.safe_dump({"groups": [{"name": "kvtier", "rules": rules}]}, sort_keys=False, width=1000)
    return "# Generated from appliance/observability/alerts.py by `make docs`.\n" + text
