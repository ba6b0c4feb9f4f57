"""`python -m bench.clients [--clients 1,2,4,8,16]`: many processes put and get at one store of a host.

Each process puts a fresh chain, gets it back, compares its stamps, and goes on; all begin together. The
stores take turns within a cell, so that all meet the same minute. `least` is the slowest client's share of an
equal share (1: fair). `server us` is the processor time of the store's processes per put and get together:
where the store is one event loop, a million over that is what it can do, however many processors there are.
With more clients than processors p99 tells of the kernel's scheduler, too.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.machine import print_machine
from bench.peers import DEFAULT_DIR, RECIPES
from bench.rig import Seat, seated, second_client, stores
from bench.table import milliseconds, percentile, render, size_text

MIB, GIB = 1 << 20, 1 << 30
SHAPES = ((64 << 10, 1), (2 * MIB, 1))  # bytes of a fragment, fragments a call
COLUMNS = (
    *("shape", "store", "clients", "pairs/s", "GB/s", "put p50", "p99", "get p50", "p99"),
    *("least", "refused", "lost", "server us", "server cores"),
)


def cpu_s(root: int) -> float:
    """Return the processor seconds of all living descendants of a process, that process excluded."""
    parents: dict[int, int] = {}
    spent: dict[int, float] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it ended meanwhile
            parents[int(entry.name)] = int(fields[1])
            spent[int(entry.name)] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    below, total = {root}, 0.0
    while grown := {pid for pid, parent in parents.items() if parent in below} - below:
        below |= grown
        total += sum(spent[pid] for pid in grown)
    return total


def measure(seats: list[Seat], shape: tuple[int, int], seconds: float) -> list[str]:
    """Let all clients of one store run at once; return the row, without the shape."""
    size, batch = shape
    server, before_s = seats[0].process_id, cpu_s(seats[0].process_id)
    for seat in seats:
        seat.send("turns", size=size, batch=batch, seconds=seconds)
    found: list[dict[str, Any]] = [seat.receive() for seat in seats]
    server_s = cpu_s(server) - before_s
    puts = [ns for one in found for ns in one["put"]]
    gets = [ns for one in found for ns in one["get"]]
    elapsed_s = max(one["seconds"] for one in found)
    shares = [len(one["get"]) / one["seconds"] for one in found]
    pairs_per_s = sum(shares)
    return [
        seats[0].name,
        str(len(seats)),
        f"{pairs_per_s:,.0f}",
        f"{2 * pairs_per_s * size * batch / 1e9:.2f}",
        *(milliseconds(value) for value in (statistics.median(puts), percentile(puts, 0.99))),
        *(milliseconds(value) for value in (statistics.median(gets), percentile(gets, 0.99))),
        f"{min(shares) / (pairs_per_s / len(shares)):.2f}",
        *(str(sum(one[what] for one in found)) for what in ("refused", "lost")),
        f"{server_s * 1e6 / len(gets):.0f}",
        f"{server_s / elapsed_s:.2f}",
    ]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.clients", description=__doc__)
    parser.add_argument("--clients", default="1,2,4,8,16", help="how many processes")
    parser.add_argument("--seconds", type=float, default=3.0, help="of one measurement")
    parser.add_argument("--only", metavar="STORES", help="comma-separated, of kvtier,mooncake,lmcache")
    parser.add_argument("--peers", type=Path, default=DEFAULT_DIR)
    args = parser.parse_args()
    names = stores(args.peers, args.only.split(",") if args.only else ["kvtier", *RECIPES])
    print_machine({name: RECIPES[name].version for name in names if name in RECIPES})
    counts = sorted(map(int, args.clients.split(",")))
    with ExitStack() as stack:
        everyone = [[seat] for seat in stack.enter_context(seated(names, args.peers, 2 * GIB))]
        for count in counts:
            for seats in everyone:
                while len(seats) < count:
                    seats.append(stack.enter_context(second_client(seats[0], args.peers)))
            rows = [
                [f"{size_text(shape[0])} x {shape[1]}", *measure(seats, shape, args.seconds)]
                for shape in SHAPES
                for seats in everyone
            ]
            print("\n" + render(COLUMNS, rows), flush=True)
    print(f"\nload now {' '.join(f'{value:.1f}' for value in os.getloadavg())}; times in ms")
    return 0


if __name__ == "__main__":
    sys.exit(main())
