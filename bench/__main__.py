"""`python -m bench [SECTION…] [--peers DIR] [--json FILE] [--quick]`: kvtier beside memcpy and its peers, in
one run.

A benchmark reports, it never asserts a time: absolute figures drift with the machine's load, so what counts
are the ratios of stores measured in the same minute. Bytes are compared in every section; wrong ones end the
run.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench import answers, transfer
from bench.machine import ROOT, print_machine, write_report
from bench.peers import DEFAULT_DIR, RECIPES, debian_line, install_line, is_installed
from bench.rig import StoresDown, seated, stores
from bench.transfer import GIB, MIB, Effort

TITLES = {
    "get": "get: stored fragments into the caller's buffer",
    "put": "put: until the acknowledgement, fresh keys, no eviction (plain: from unshared memory)",
    "lookup": "lookup: one client",
    "pressure": "pressure: lookups of 16 keys while another process puts into a full pool",
    "flood": "flood: 2 MiB puts back to back into 256 MiB (all may spill to disk)",
    "cold": "cold: the NVMe tier",
    "restart": "restart: time until a cold store is ready again",
}
DELEGATED = {"cold": ["bench.cold", "--total", "512"], "restart": ["bench.cold", "--recover"]}
QUICKER = {"cold": ["--total", "256", "--rounds", "1", "--threads", "4"], "restart": ["100000"]}


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description="kvtier beside its peers")
    parser.add_argument(
        "sections", nargs="*", metavar="SECTION", help=f"of {', '.join(TITLES)}; default: all"
    )
    parser.add_argument(
        "--peers", type=Path, default=DEFAULT_DIR, help="where `bench.peers install` put them"
    )
    parser.add_argument("--only", metavar="STORES", help="comma-separated, of memcpy,kvtier,mooncake,lmcache")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write machine and rows to FILE")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter rounds")
    args = parser.parse_args(arguments)
    if unknown := set(args.sections) - set(TITLES):
        parser.error(f"unknown section {', '.join(sorted(unknown))}; known: {', '.join(TITLES)}")
    args.sections = args.sections or list(TITLES)
    return args


def main() -> int:
    args = parse()
    wanted = args.only.split(",") if args.only else ["memcpy", "kvtier", *RECIPES]
    names = stores(args.peers, wanted)
    machine = print_machine({name: RECIPES[name].version for name in names if name in RECIPES})
    if missing := [name for name in wanted if name in RECIPES and not is_installed(args.peers, name)]:
        print(f"\nWithout {' and '.join(missing)}; to install: {install_line(missing, args.peers)}")
    rows: dict[str, list[dict[str, Any]]] = {}
    failed = False
    began = time.monotonic()
    for part in (_transfers, _pressure, _flood):
        try:
            for section, found, text in _with_what_starts(part, args, names):
                rows[section] = [asdict(row) for row in found]
                print(f"\n{TITLES[section]}  [{time.monotonic() - began:.0f} s]\n{text}", flush=True)
        except RuntimeError as error:  # a store failed or returned wrong bytes; the other parts still count
            failed = True
            print(f"\nFAILED: {error}", flush=True)
    for section in args.sections:
        if section in DELEGATED:
            _delegate(section, args.quick)
    load = " ".join(f"{value:.1f}" for value in os.getloadavg())
    print(f"\nload now {load}: above the number of cores, p99 and max tell more of neighbours than of stores")
    write_report(args.json, machine=machine, rows=rows)
    return int(failed)


Part = Iterator[tuple[str, list[Any], str]]  # (section, its rows, its table)


def _with_what_starts(
    part: Callable[[argparse.Namespace, list[str]], Part], args: argparse.Namespace, names: list[str]
) -> Part:
    """Yield what `part` yields, again from its beginning without the peers that did not start.

    Such peers are removed from `names`, with the reason printed. Raises StoresDown when kvtier or memcpy
    did not start.
    """
    while True:
        try:
            yield from part(args, names)
            return
        except StoresDown as down:
            if not set(down.causes) <= set(RECIPES):
                raise
            for name, cause in down.causes.items():
                names.remove(name)
                print(f"\nWithout {name}, which did not start: {cause.strip()}")
                if line := debian_line(name):
                    print(f"{name} needs system libraries; on Debian: {line}", flush=True)


def _transfers(args: argparse.Namespace, names: list[str]) -> Part:
    """Run sections get, put and lookup, which share their running stores."""
    wanted = [section for section in ("get", "put", "lookup") if section in args.sections]
    if not wanted:
        return
    effort = Effort(3, 0.12, 512 * MIB) if args.quick else Effort(5, 0.25, GIB)
    with seated(names, args.peers, pool=2 * effort.put_bytes) as seats:
        for section in wanted:
            if section == "lookup":
                looked = answers.run_lookup(seats, effort)
                yield section, looked, answers.report_lookup(looked)
            else:
                moved = transfer.run(section, seats, effort)
                yield section, moved, transfer.report(moved)


def _pressure(args: argparse.Namespace, names: list[str]) -> Part:
    if "pressure" in args.sections:
        objects, seconds = (50_000, 2.0) if args.quick else (400_000, 6.0)
        # Filling LMCache takes over a minute: only when asked for by name.
        pressing = [name for name in names if name != "lmcache" or args.only]
        pressed = answers.run_pressure(pressing, args.peers, objects, seconds)
        yield "pressure", pressed, answers.report_pressure(pressed)


def _flood(args: argparse.Namespace, names: list[str]) -> Part:
    if "flood" in args.sections:
        flooded = answers.run_flood(names, args.peers, puts=300 if args.quick else 1000, seconds=8.0)
        yield "flood", flooded, answers.report_flood(flooded)


def _delegate(section: str, quick: bool) -> None:
    print(f"\n{TITLES[section]}", flush=True)
    module, *arguments = [*DELEGATED[section], *(QUICKER[section] if quick else [])]
    if importlib.util.find_spec(module) is None:
        print(f"{module} is not part of this checkout")
        return
    subprocess.run([sys.executable, "-m", module, *arguments], cwd=ROOT, check=True)


if __name__ == "__main__":
    sys.exit(main())
