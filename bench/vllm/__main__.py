"""`python -m bench.vllm [SECTION…] [--json FILE] [--quick]`: the real engine with kvtier, in one run.

Run it with the environment that `make test-vllm` makes. A benchmark reports, it never asserts a time.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.machine import print_machine, write_report
from bench.vllm import fleet, new_host, overhead, recovery, ttft
from bench.vllm.measure import versions
from bench.vllm.priority import use_priority
from examples.network import LINK
from examples.screen import Screen

TITLES = {
    "ttft": "ttft: seconds to the first token of a stored prompt (mid: 143 M parameters, bfloat16)",
    "overhead": "overhead: a workload in which nothing repeats (mid)",
    "recovery": "recovery: the appliance is lost under load (mid)",
    "store": "store: seconds to the first token on a new host, the first is gone with its disk (mid)",
    "fleet": "fleet: seconds to the first token of what another host computed, in namespaces (mid)",
}
RUN: dict[str, Callable[[argparse.Namespace], list[Any]]] = {
    "ttft": lambda args: ttft.run(args.quick, args.rounds, args.store or ttft.STORES),
    "overhead": lambda args: overhead.run(
        args.quick, overhead.Plan(overhead.Against(args.against), args.rounds)
    ),
    "recovery": lambda args: recovery.run(args.quick),
    "store": lambda args: new_host.run(args.quick, args.rounds, args.gateway),
    "fleet": lambda args: fleet.run(args.quick, args.rounds, args.link),
}
REPORT: dict[str, Callable[[Any], str]] = {
    "ttft": ttft.report,
    "overhead": overhead.report,
    "recovery": recovery.report,
    "store": new_host.report,
    "fleet": new_host.report,
}


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.vllm", description="vLLM with kvtier and without")
    parser.add_argument(
        "sections", nargs="*", metavar="SECTION", help=f"of {', '.join(TITLES)}; default: all"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write machine and samples to FILE")
    parser.add_argument(
        "--niceness",
        type=int,
        help="of engines and appliance while a sample is taken, with short slices; negative needs root",
    )
    parser.add_argument(
        "--against",
        choices=list(overhead.Against),
        default=overhead.Against.SWITCH,
        help="overhead: kvtier switched on and off in one engine; two engines, one of them with it; two "
        "without, which shows the noise",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=0,
        help="how many: of overhead 8, of ttft 15 in memory and 6 on disk, of store 3, if not said",
    )
    parser.add_argument(
        "--store", action="append", choices=ttft.STORES, help="ttft: from where; default: from both in turn"
    )
    parser.add_argument(
        "--pool",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="overhead: only report earlier runs, taken together",
    )
    parser.add_argument(
        "--gateway",
        action="store_true",
        help="store: from Ceph's S3 gateway, started for it; default: a folder",
    )
    parser.add_argument(
        "--link", default=LINK, help="fleet: the network of each host, in words of `tc qdisc`"
    )
    parser.add_argument("--picture", type=Path, metavar="FILE", help="write the tables as an SVG")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller rounds")
    args = parser.parse_args(arguments)
    if unknown := set(args.sections) - set(TITLES):
        parser.error(f"unknown section {', '.join(sorted(unknown))}; known: {', '.join(TITLES)}")
    args.sections = args.sections or list(TITLES)
    return args


def main() -> None:
    args = parse()
    if args.pool:
        print(overhead.report([one for file in args.pool for one in overhead.read(file)]))
        return
    use_priority(args.niceness)
    machine = print_machine(versions())
    screen = Screen(is_recorded=args.picture is not None)
    results: dict[str, list[dict[str, Any]]] = {}
    for section in args.sections:
        began_at_s = time.monotonic()
        samples = RUN[section](args)
        results[section] = [asdict(sample) for sample in samples]
        load = " ".join(f"{value:.1f}" for value in os.getloadavg())
        screen.say(f"\n{TITLES[section]}  [{time.monotonic() - began_at_s:.0f} s, load {load} at its end]")
        screen.say(REPORT[section](samples))
    if args.picture is not None:
        screen.save(args.picture, f"python -m bench.vllm {' '.join(args.sections)}")
    write_report(args.json, machine=machine, results=results)
    if any(sample.get("is_exact") is False for many in results.values() for sample in many):
        raise SystemExit("an answer is not that of vLLM's own cache")


if __name__ == "__main__":
    main()
