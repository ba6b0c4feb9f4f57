"""What metrics and telemetry cost: per call, per request, per scrape.

    python -m bench.observation_cost [--blocks 1000000]

The first table is what requests pay: one observation of a duration, and the telemetry of one step beside the
step itself, for chains of 64 blocks. The second is what lookers pay, on the daemon's loop: counting the bytes
of a tier by urgency, and one scrape and one snapshot of a real daemon.
"""

import argparse
import asyncio
import hashlib
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import prometheus_client

from kvtier.appliance.core import events as ev
from kvtier.appliance.histogram import Histogram
from kvtier.appliance.host.daemon import Daemon, embedded_settings
from kvtier.appliance.observability.census import MAX_SHARE, bytes_by_urgency
from kvtier.appliance.observability.exposition import exposition
from kvtier.appliance.observability.telemetry import Telemetry
from kvtier.tiers.block import Tier

from .catalog import CHAIN, CatalogRig
from .machine import describe
from .table import render

COMMAND = "python -m bench.observation_cost"
NUM_OBSERVATIONS = 200_000
NUM_REQUESTS = 2_000
ROUNDS = 5  # the quickest counts: the others were disturbed


def quickest(run: Callable[[], object], number: int) -> float:
    """Return seconds per call of `run`, in the quickest of ROUNDS rounds of `number` calls."""
    best = float("inf")
    for _ in range(ROUNDS):
        began_at = time.perf_counter()
        for _ in range(number):
            run()
        best = min(best, (time.perf_counter() - began_at) / number)
    return best


def observations() -> list[tuple[str, ...]]:
    """Return rows: one observation, ours and prometheus_client's."""
    own, theirs = Histogram(), prometheus_client.Histogram("x", "x", ["method", "code"], registry=None)
    own_s = quickest(lambda: own.observe(0.0003), NUM_OBSERVATIONS)
    theirs_s = quickest(lambda: theirs.labels("Acquire", "OK").observe(0.0003), NUM_OBSERVATIONS)
    return [
        ("observe a duration", f"{own_s * 1e9:.0f} ns", ""),
        ("the same, prometheus_client", f"{theirs_s * 1e9:.0f} ns", f"{theirs_s / own_s:.1f}x"),
    ]


def steps(rig: CatalogRig) -> list[tuple[str, ...]]:
    """Return rows: telemetry of a step, as a share of the planner's own time for it."""
    telemetry = Telemetry(rig.planner)
    rows: list[tuple[str, ...]] = []
    chain = [hashlib.sha256(b"bench %d" % i).digest() for i in range(CHAIN)]
    rig.put(chain)
    touched = ev.Touched(1, 1, chain, "session")
    acquired = [ev.AcquireRequested(call, 1, "", 1, chain, "session") for call in range(NUM_REQUESTS)]
    for name, events in (("touch", [touched] * NUM_REQUESTS), ("acquire", acquired)):
        planner_s = telemetry_s = float("inf")
        for _ in range(ROUNDS):
            spent = [0.0, 0.0]
            for event in events:
                began_at = time.perf_counter()
                instructions = rig.planner.handle(event, rig.now)
                planned_at = time.perf_counter()
                telemetry.stepped(event, instructions, rig.now)
                spent[0] += planned_at - began_at
                spent[1] += time.perf_counter() - planned_at
                leases = list(rig.planner.leases.clients[1].leases)
                rig.planner.handle(ev.ReleaseRequested(None, 1, leases), rig.now)
            planner_s = min(planner_s, spent[0] / NUM_REQUESTS)
            telemetry_s = min(telemetry_s, spent[1] / NUM_REQUESTS)
        share = f"{telemetry_s / planner_s:.1%} of {planner_s * 1e6:.0f} us"
        rows.append((f"telemetry of a {name} of {CHAIN}", f"{telemetry_s * 1e6:.2f} us", share))
    assert telemetry.check_integrity() == []
    return rows


def census(num_blocks: int) -> tuple[str, ...]:
    """Return the row of counting a tier of `num_blocks`."""
    rig = CatalogRig(num_blocks + CHAIN)
    for first in range(0, num_blocks, CHAIN):
        rig.put([hashlib.sha256(b"%d" % i).digest() for i in range(first, first + CHAIN)])
    seconds = quickest(lambda: bytes_by_urgency(rig.planner.catalog, Tier.DRAM), 3)
    return (
        f"bytes by urgency of {num_blocks:,} blocks",
        f"{seconds * 1e3:.1f} ms",
        f"at most {MAX_SHARE:.1%} of the time",
    )


async def looks() -> list[tuple[str, ...]]:
    """Return rows: a scrape and a snapshot of a daemon that does nothing else."""
    with tempfile.TemporaryDirectory() as folder:
        daemon = await Daemon.start(embedded_settings(f"unix://{folder}/k.sock", Path(folder) / "data"))
        view = daemon.observability.view
        scrape_s = quickest(lambda: exposition(view), 20)
        snapshot_s = quickest(lambda: daemon.observability.snapshot(300), 20)
        size = len(exposition(view))
        await daemon.stop()
    return [
        ("one scrape", f"{scrape_s * 1e3:.2f} ms", f"{size / 1024:.0f} KiB"),
        ("one snapshot", f"{snapshot_s * 1e3:.2f} ms", ""),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    arguments = parser.parse_args()
    machine = describe({})
    print("\n".join([f"{COMMAND} --blocks {arguments.blocks}", *(f"{k}: {v}" for k, v in machine.items())]))
    print(render(("what requests pay", "time", "compared"), [*observations(), *steps(CatalogRig(4096))]))
    rows = [census(arguments.blocks), *asyncio.run(looks())]
    print(render(("what lookers pay", "time", ""), rows))


if __name__ == "__main__":
    main()
