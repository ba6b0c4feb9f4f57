"""Report: outcomes as a table for people and as plain values for programs."""

from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..config.units import about_bytes, about_duration, format_duration
from .outcomes import Outcome
from .savings import BASELINE, CacheSaving, savings
from .traces import Trace

#: Percentiles of seconds to the first token that tables show.
SHOWN = ("p50", "p90", "p99")


def about(trace: Trace) -> str:
    """Return one line about a trace."""
    lost = f"; {trace.num_lost:,} accesses were lost when it was recorded" if trace.num_lost else ""
    return (
        f"{trace.name}: {trace.num_requests:,} requests, {trace.num_accesses:,} block accesses, "
        f"{trace.num_blocks:,} distinct blocks, {format_duration(round(trace.duration_s))}{lost}"
    )


def plain(trace: Trace, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return everything as plain values with stable names."""
    return {
        "trace": {
            "name": trace.name,
            "num_requests": trace.num_requests,
            "num_accesses": trace.num_accesses,
            "num_blocks": trace.num_blocks,
            "duration_s": trace.duration_s,
            "num_lost": trace.num_lost,
        },
        "outcomes": [outcome.plain() for outcome in outcomes],
        "savings": [{**one._asdict(), "saved_share": one.saved_share} for one in savings(outcomes)],
    }


def tables(trace: Trace, outcomes: Sequence[Outcome]) -> RenderableType:
    """Return what `kvtier replay` prints."""
    parts: list[RenderableType] = [Text(about(trace)), hits(outcomes)]
    if any(outcome.ttft_s for outcome in outcomes):
        parts += [Text(), times(outcomes)]
    else:
        parts += [Text(), sizes(outcomes)]
    if found := savings(outcomes):
        parts += [Text(), saved(found)]
    if any(outcome.store for outcome in outcomes):
        parts += [Text(), stores(outcomes)]
    if any(any(outcome.prefetch.values()) for outcome in outcomes):
        parts += [Text(), prefetches(outcomes)]
    for outcome in outcomes:
        for reason, count in outcome.refusals.items():
            parts.append(Text(f"{outcome.label}: {count:,} calls were refused, {reason}", "bold yellow"))
    parts += [Text(problem, "bold red") for outcome in outcomes for problem in outcome.problems]
    return Group(*parts)


def tiers_of(outcomes: Sequence[Outcome]) -> list[str]:
    """Return the names of the tiers that were hit, fastest first; those of the longest ladder first."""
    ladders = sorted((list(outcome.token_hits) for outcome in outcomes), key=len, reverse=True)
    return list(dict.fromkeys(tier for ladder in ladders for tier in ladder))


def hits(outcomes: Sequence[Outcome]) -> Table:
    """Return hit ratios; where setups differ in both policy and capacity, a line each."""
    table = _table("policy", "capacity")
    tiers = tiers_of(outcomes)
    names = ["token hits", "block hits"]
    if len(tiers) > 1:
        names += [f"from {tier}" for tier in tiers]
    names += ["ideal speed-up", "prefill saved", "refused puts", "accesses/s"]
    _add_figures(table, names)
    for outcome in outcomes:
        cells = [f"{outcome.token_hit_ratio:.2%}", f"{outcome.block_hit_ratio:.2%}"]
        if len(tiers) > 1:
            cells += [f"{outcome.token_hits.get(tier, 0) / (outcome.num_tokens or 1):.2%}" for tier in tiers]
        speed = outcome.num_blocks / outcome.cpu_s if outcome.cpu_s else 0.0
        cells += [f"{outcome.ideal_speed_up:.2f} ×", about_duration(outcome.prefill_saved_s)]
        cells += [f"{outcome.num_refused_blocks:,}", f"{speed:,.0f}"]
        table.add_row(outcome.policy, outcome.capacity, *cells)
    return table


def times(outcomes: Sequence[Outcome]) -> Table:
    """Return seconds and bytes moved."""
    table = _table("policy", "capacity")
    moved = ("nvme → dram", "→ nvme", "→ nvme a day")
    _add_figures(table, (*(f"first token {name}" for name in SHOWN), *moved))
    for outcome in outcomes:
        written = sum(count for edge, count in outcome.edge_bytes.items() if edge.endswith(">nvme"))
        table.add_row(
            outcome.policy,
            outcome.capacity,
            *(f"{outcome.ttft_s.get(name, 0.0):.3f} s" for name in SHOWN),
            about_bytes(outcome.edge_bytes.get("nvme>dram", 0)),
            about_bytes(written),
            about_bytes(outcome.nvme_written_bytes_per_day),
        )
    return table


def sizes(outcomes: Sequence[Outcome]) -> Table:
    """Return what a share is in bytes, and seconds to the first token if loads took no time."""
    table = _table("policy", "capacity")
    _add_figures(table, ("cache size", *(f"first token {name}, ideally" for name in SHOWN)))
    for outcome in outcomes:
        seconds = (f"{outcome.missing_prefill_s.get(name, 0.0):.3f} s" for name in SHOWN)
        size_bytes = sum(outcome.capacity_bytes.values())
        table.add_row(outcome.policy, outcome.capacity, about_bytes(size_bytes), *seconds)
    return table


def saved(found: Sequence[CacheSaving]) -> Table:
    """Return how much smaller a cache has the hits of the baseline."""
    table = _table("policy", f"as many hits as {BASELINE} at")
    _add_figures(table, ("token hits", "cache needed", "cache saved"))
    for one in found:
        less, more = ("≤ ", "≥ ") if one.is_bound else ("", "")
        needed, share = f"{less}{about_bytes(one.needed_bytes)}", f"{more}{one.saved_share:.1%}"
        table.add_row(one.policy, one.capacity, f"{one.token_hit_ratio:.2%}", needed, share)
    return table


def stores(outcomes: Sequence[Outcome]) -> Table:
    """Return what an object store brought, and what it cost."""
    table = _table("policy", "capacity")
    _add_figures(
        table,
        ("store sent", "store fetched", "bundles stored", "ever fetched", "requests", "prefill fetched"),
    )
    _add_figures(table, ["dollars"])
    for outcome in outcomes:
        if not outcome.store:
            continue
        store = outcome.store
        share = store["num_bundles_read"] / (store["num_bundles_stored"] or 1)
        table.add_row(
            outcome.policy,
            outcome.capacity,
            about_bytes(store["stored_bytes"]),
            about_bytes(store["fetched_bytes"]),
            f"{store['num_bundles_stored']:,.0f}",
            f"{share:.0%}",
            f"{store['num_requests']:,.0f}",
            about_duration(store["prefill_saved_s"]),
            f"{store['dollars']:.2f}",
        )
    return table


def prefetches(outcomes: Sequence[Outcome]) -> Table:
    """Return what prefetching achieved."""
    table = _table("policy", "capacity")
    names = sorted({name for outcome in outcomes for name in outcome.prefetch})
    _add_figures(table, [name.replace("_", " ") for name in names])
    for outcome in outcomes:
        counts = {name: outcome.prefetch.get(name, 0) for name in names}
        cells = [about_bytes(n) if name.endswith("bytes") else f"{n:,}" for name, n in counts.items()]
        table.add_row(outcome.policy, outcome.capacity, *cells)
    return table


def differences(before: Outcome, after: Outcome) -> Table:
    """Return two outcomes side by side, with what the change did."""
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for name in (before.policy, after.policy, "change"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, old, new, unit in _figures(before, after):
        sign = "+" if new > old else ""
        change = f"{sign}{(new - old) * 100:.2f} points" if unit == "%" else _relative(old, new)
        table.add_row(name, _words(old, unit), _words(new, unit), change)
    return table


def _figures(before: Outcome, after: Outcome) -> list[tuple[str, float, float, str]]:
    both = (before, after)
    figures = [("token hits", *(o.token_hit_ratio for o in both), "%")]
    figures += [("block hits", *(o.block_hit_ratio for o in both), "%")]
    for tier in tiers_of(both):
        figures.append(
            (f"token hits from {tier}", *(o.token_hits.get(tier, 0) / (o.num_tokens or 1) for o in both), "%")
        )
    figures.append(("prefill saved", *(o.prefill_saved_s for o in both), "s"))
    for name in SHOWN:
        if before.ttft_s and after.ttft_s:
            figures.append((f"first token {name}", *(o.ttft_s[name] for o in both), "s"))
    for edge in sorted({edge for o in both for edge in o.edge_bytes}):
        figures.append((edge.replace(">", " → "), *(float(o.edge_bytes.get(edge, 0)) for o in both), "B"))
    figures.append(("→ nvme a day", *(o.nvme_written_bytes_per_day for o in both), "B"))
    figures.append(("refused blocks of puts", *(float(o.num_refused_blocks) for o in both), ""))
    if any(o.refusals for o in both):
        figures.append(("refused calls", *(float(sum(o.refusals.values())) for o in both), ""))
    return figures  # type: ignore[return-value]


def _words(value: float, unit: str) -> str:
    if unit == "%":
        return f"{value:.2%}"
    if unit == "B":
        return about_bytes(value)
    return f"{value:,.3f} s" if unit == "s" else f"{value:,.0f}"


def _relative(old: float, new: float) -> str:
    if old == new:
        return "="
    return f"{(new - old) / old:+.1%}" if old else "new"


def _table(*names: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in names:
        table.add_column(name, overflow="fold", vertical="bottom")
    return table


def _add_figures(table: Table, names: Sequence[str]) -> None:
    """Add columns of numbers, named in two lines: eight of them fit beside the names of a setup."""
    for name in names:
        head, _, last = name.rpartition(" ")
        table.add_column(f"{head}\n{last}", justify="right", no_wrap=True, vertical="bottom")
