"""Sections `get` and `put`: bytes per second and latency, against memcpy and the peers, round by round.

All stores are measured in turn, A B C A B C, and the median round counts: what disturbs the machine disturbs
all of them. Measuring one store after the other was tried by the studies before us and gave ratios that moved
by a factor of two from run to run.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from bench.rig import Seat
from bench.table import milliseconds, percentile, ratio, render, size_text

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
CELLS = [
    (size, batch)
    for size, most in ((64 * KIB, 64), (256 * KIB, 64), (2 * MIB, 32), (32 * MIB, 4))
    for batch in (1, most)
]
FOOTPRINT_BYTES = 256 * MIB  # of what gets cycle over and memcpy's puts write: several times the last cache
MAX_OBJECTS = 2048


@dataclass(frozen=True, slots=True)
class Effort:
    """How long a cell is measured. `put_bytes`: most that one round puts, so that nothing is evicted."""

    rounds: int
    round_s: float
    put_bytes: int


@dataclass(slots=True)
class TransferRow:
    """Median over the rounds, of one store in one cell. Latencies are of one call, that is of one batch.

    `gb_per_s` is bytes over the median latency: the rate of a call that keeps its core. The mean,
    which a busy neighbour moves by half, is kept beside it.
    """

    section: str
    store: str
    form: str
    size: int
    batch: int
    count: int  # calls in a round
    gb_per_s: float
    mean_gb_per_s: float
    p50_ns: float
    p99_ns: float
    of_memcpy: float | None = None  # throughput, as a share of memcpy's
    kvtier_over: float | None = None  # kvtier's throughput over this store's, in the same form if it has it


@dataclass(slots=True)
class Contender:
    """A store in one form of the operation, with what its rounds gave."""

    seat: Seat
    form: str
    arguments: dict[str, Any]
    count: int
    rounds: list[list[int]]


def run(section: str, seats: list[Seat], effort: Effort) -> list[TransferRow]:
    """Measure every cell of section "get" or "put" and return its rows."""
    rows = []
    for size, batch in CELLS:
        contenders = _prepare(section, seats, size, batch, effort)
        for turn in range(effort.rounds):
            shift = turn % len(contenders)
            for one in contenders[shift:] + contenders[:shift]:
                one.rounds.append(one.seat.call(section, count=one.count, **one.arguments)["ns"])
        rows += with_ratios([_row(section, one, size, batch) for one in contenders])
    return rows


def _prepare(section: str, seats: list[Seat], size: int, batch: int, effort: Effort) -> list[Contender]:
    """Put what the cell needs into each store, then find how many calls fill a round."""
    num_chains = max(1, min(FOOTPRINT_BYTES // (size * batch), MAX_OBJECTS // batch))
    contenders = []
    for seat in seats:
        seat.call("prepare", size=size, batch=batch, chains=num_chains if section == "get" else 1)
        for form in seat.forms if section == "put" else [""]:
            arguments = {"form": form} if form else {}
            seat.call(section, count=2, **arguments)
            first = seat.call(section, count=5, **arguments)["ns"]
            count = max(3, int(effort.round_s * 1e9 / statistics.median(first)))
            if section == "put":
                if seat.name == "memcpy":
                    count = max(count, FOOTPRINT_BYTES // (size * batch))
                count = max(2, min(count, effort.put_bytes // (size * batch)))
            contenders.append(Contender(seat, form, arguments, count, []))
    return contenders


def _row(section: str, one: Contender, size: int, batch: int) -> TransferRow:
    volume = size * batch
    return TransferRow(
        section=section,
        store=one.seat.name,
        form=one.form,
        size=size,
        batch=batch,
        count=one.count,
        gb_per_s=statistics.median(volume / statistics.median(ns) for ns in one.rounds),
        mean_gb_per_s=statistics.median(volume * len(ns) / sum(ns) for ns in one.rounds),
        p50_ns=statistics.median(percentile(ns, 0.50) for ns in one.rounds),
        p99_ns=statistics.median(percentile(ns, 0.99) for ns in one.rounds),
    )


def with_ratios(rows: list[TransferRow]) -> list[TransferRow]:
    floor = next((row.gb_per_s for row in rows if row.store == "memcpy"), None)
    ours = {row.form: row.gb_per_s for row in rows if row.store == "kvtier"}
    for row in rows:
        if floor and row.store != "memcpy":
            row.of_memcpy = row.gb_per_s / floor
        if row.form in ours and row.store != "kvtier":
            row.kvtier_over = ours[row.form] / row.gb_per_s
    return rows


def report(rows: list[TransferRow]) -> str:
    """Return the section's table: one group of lines per cell."""
    lines: list[list[str]] = []
    for row in rows:
        if lines and (row.store, row.form) == (rows[0].store, rows[0].form):
            lines.append([])
        form = f" ({row.form})" if row.form == "plain" else ""
        lines.append(
            [
                f"{size_text(row.size)} x {row.batch}",
                row.store + form,
                f"{row.gb_per_s:.2f}",
                f"{row.mean_gb_per_s:.2f}",
                milliseconds(row.p50_ns),
                milliseconds(row.p99_ns),
                ratio(row.of_memcpy),
                ratio(row.kvtier_over),
                str(row.count),
            ]
        )
    header = ["fragments", "store", "GB/s", "mean", "p50 ms", "p99 ms", "of memcpy", "kvtier is", "calls"]
    return render(header, lines)
