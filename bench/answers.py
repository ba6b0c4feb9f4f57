"""Sections `lookup`, `pressure` and `flood`: what a store answers, how fast, and whether it can be believed.

`pressure` runs one store after the other, because each needs gigabytes for 400,000 fragments; its figure is
the longest single answer, which no neighbour can improve.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path

from bench.rig import Seat, seated, second_client
from bench.table import milliseconds, percentile, ratio, render
from bench.transfer import KIB, MIB, Effort

KEYS_A_CALL = (1, 16, 128, 1024)
SMALL = 4 * KIB  # of a fragment with any bytes
PROBE_KEYS = 16
FLOOD_POOL = 256 * MIB
FLOOD_FRAGMENT = 2 * MIB
FILLED = 0.9  # of the pool before the flood: the peers start to evict at 0.95, kvtier here
SLOT_BYTES = {"kvtier": 16 * KIB}  # smallest place in a pool; the peers pack objects of 4 KiB


@dataclass(frozen=True, slots=True)
class LookupRow:
    """Median over the rounds. `keys_per_s` is keys over the median latency of a call."""

    store: str
    keys: int
    keys_per_s: float
    p50_ns: float
    p99_ns: float


@dataclass(frozen=True, slots=True)
class PressureRow:
    """Lookups of one client while another process puts into a full pool. Durations of one call."""

    store: str
    fragments: int  # acknowledged while filling
    calm_p50_ns: float
    calm_max_ns: float
    p50_ns: float
    p99_ns: float
    max_ns: float
    puts_per_s: float  # fragments acknowledged during the flood


@dataclass(frozen=True, slots=True)
class FloodRow:
    """Back-to-back puts of a many-fold of the pool. `lost` were acknowledged and are in no tier."""

    store: str
    put: int
    refused: int
    acknowledged: int
    present: int
    lost: int
    gb_per_s: float  # acknowledged
    p50_ns: float
    max_ns: float


def run_lookup(seats: list[Seat], effort: Effort) -> list[LookupRow]:
    """Measure lookups of one client, `KEYS_A_CALL` keys a call, interleaved like the transfers."""
    seats = [seat for seat in seats if seat.name != "memcpy"]
    counts: dict[tuple[str, int], int] = {}
    rounds: dict[tuple[str, int], list[list[int]]] = {}
    for seat in seats:
        seat.call("prepare", size=SMALL, batch=max(KEYS_A_CALL), chains=4)
        for keys in KEYS_A_CALL:
            first = seat.call("lookup", count=10, keys=keys)["ns"]
            counts[seat.name, keys] = max(5, int(effort.round_s / 2 * 1e9 / statistics.median(first)))
    for turn in range(effort.rounds):
        for keys in KEYS_A_CALL:
            shift = turn % max(1, len(seats))
            for seat in seats[shift:] + seats[:shift]:
                latencies = seat.call("lookup", count=counts[seat.name, keys], keys=keys)["ns"]
                rounds.setdefault((seat.name, keys), []).append(latencies)
    return [
        LookupRow(
            store=seat.name,
            keys=keys,
            keys_per_s=statistics.median(
                keys / statistics.median(ns) * 1e9 for ns in rounds[seat.name, keys]
            ),
            p50_ns=statistics.median(percentile(ns, 0.50) for ns in rounds[seat.name, keys]),
            p99_ns=statistics.median(percentile(ns, 0.99) for ns in rounds[seat.name, keys]),
        )
        for keys in KEYS_A_CALL
        for seat in seats
    ]


def run_pressure(names: list[str], peers: Path, objects: int, seconds: float) -> list[PressureRow]:
    """Measure lookups under pressure: fill pools with `objects` fragments, look up while they are flooded."""
    rows = []
    for name in names:
        if name == "memcpy":
            continue
        pool = int(objects * SLOT_BYTES.get(name, SMALL) / FILLED) // (64 * MIB) * 64 * MIB
        with seated([name], peers, pool, warm=False) as (seat,), second_client(seat, peers) as flooder:
            batch = 512
            stored = seat.call("fill", size=SMALL, batch=batch, objects=objects)["acknowledged"]
            flooder.call("fill", size=SMALL, batch=batch, objects=batch)
            calm = seat.call("probe", seconds=seconds / 3, keys=PROBE_KEYS)["ns"]
            flooder.send("flood", seconds=seconds, limit=1 << 30)
            probed = seat.call("probe", seconds=seconds, keys=PROBE_KEYS)["ns"]
            flood = flooder.receive()
            rows.append(
                PressureRow(
                    store=name,
                    fragments=stored,
                    calm_p50_ns=percentile(calm, 0.50),
                    calm_max_ns=max(calm),
                    p50_ns=percentile(probed, 0.50),
                    p99_ns=percentile(probed, 0.99),
                    max_ns=max(probed),
                    puts_per_s=flood["acknowledged"] * batch / flood["seconds"],
                )
            )
    return rows


def run_flood(names: list[str], peers: Path, puts: int, seconds: float) -> list[FloodRow]:
    """Measure a flood: `puts` fragments of 2 MiB back to back into 256 MiB, then count what is there."""
    rows = []
    for name in names:
        if name == "memcpy":
            continue
        with seated([name], peers, FLOOD_POOL, spill=True, warm=False) as (seat,):
            seat.call("fill", size=FLOOD_FRAGMENT, batch=1, objects=1)
            flood = seat.call("flood", seconds=seconds, limit=puts)
            present = seat.call("present")["present"]
            acknowledged = flood["acknowledged"]
            rows.append(
                FloodRow(
                    store=name,
                    put=flood["put"],
                    refused=flood["put"] - acknowledged,
                    acknowledged=acknowledged,
                    present=present,
                    lost=acknowledged - present,
                    gb_per_s=acknowledged * FLOOD_FRAGMENT / flood["seconds"] / 1e9,
                    p50_ns=percentile(flood["ns"], 0.50),
                    max_ns=max(flood["ns"]),
                )
            )
    return rows


def report_lookup(rows: list[LookupRow]) -> str:
    ours = {row.keys: row.keys_per_s for row in rows if row.store == "kvtier"}
    lines: list[list[str]] = []
    for row in rows:
        if lines and row.store == rows[0].store:
            lines.append([])
        over = ours[row.keys] / row.keys_per_s if row.keys in ours and row.store != "kvtier" else None
        durations = [milliseconds(row.p50_ns), milliseconds(row.p99_ns)]
        lines.append([f"{row.keys}", row.store, f"{row.keys_per_s:,.0f}", *durations, ratio(over)])
    return render(["keys a call", "store", "keys/s", "p50 ms", "p99 ms", "kvtier is"], lines)


def report_pressure(rows: list[PressureRow]) -> str:
    ours = next((row.max_ns for row in rows if row.store == "kvtier"), None)
    lines = [
        [
            row.store,
            f"{row.fragments:,}",
            *map(milliseconds, (row.calm_p50_ns, row.calm_max_ns, row.p50_ns, row.p99_ns, row.max_ns)),
            f"{row.puts_per_s:,.0f}",
            ratio(row.max_ns / ours if ours and row.store != "kvtier" else None),
        ]
        for row in rows
    ]
    header = [
        "store",
        "fragments",
        "calm p50",
        "calm max",
        "p50 ms",
        "p99 ms",
        "max ms",
        "puts/s",
        "its max / ours",
    ]
    return render(header, lines)


def report_flood(rows: list[FloodRow]) -> str:
    lines = [
        [
            row.store,
            *map(str, (row.put, row.refused, row.acknowledged, row.present, row.lost)),
            f"{row.gb_per_s:.2f}",
            milliseconds(row.p50_ns),
            milliseconds(row.max_ns),
        ]
        for row in rows
    ]
    header = ["store", "puts", "refused", "acknowledged", "present", "lost", "GB/s", "p50 ms", "max ms"]
    return render(header, lines)
