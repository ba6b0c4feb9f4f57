"""`kvtier replay --hosts`: one trace over several hosts, a row for each way to spread it."""

import resource
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from rich.table import Table

from ..config.units import about_bytes, about_duration
from ..core.copying.source_speed import HOST_LATENCY_S
from ..observability.pictures import CannotDraw, save
from ..replay.chart import fleet_chart
from ..replay.fleet import ROUTES, FleetOutcome, FleetReplay, FleetSetup
from ..replay.outcomes import Outcome
from ..replay.setups import Setup
from ..replay.traces import Trace
from ..replay.virtual import EdgeSpeed
from .output import console, new_table, print_json
from .target import Failed

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["ROUTES", "finish", "fleet_setups", "replay_fleet"]

AnOutcome = TypeVar("AnOutcome", Outcome, FleetOutcome)


def fleet_setups(
    num_hosts: Sequence[int],
    routes: Sequence[str],
    network: str | None,
    setups: Sequence[Setup],
) -> list[FleetSetup]:
    """Return a fleet for each number of hosts and route; none without `--hosts`.

    Raises ValueError for what does not fit it."""
    if not num_hosts:
        if routes or network:
            raise ValueError("--route and --network are about several hosts; name --hosts, too")
        return []
    if not setups[0].is_timed or sum(setup.store is None for setup in setups) != 1:
        raise ValueError("--hosts takes one --tiers and one --policy")
    speed = None
    if network is not None:
        speed = EdgeSpeed.parse(network, HOST_LATENCY_S)
    names = dict.fromkeys(routes or ROUTES)
    return [FleetSetup(number, route, speed) for number in num_hosts for route in names]


def replay_fleet(
    trace: Trace,
    setups: Sequence[Setup],
    fleets: Sequence[FleetSetup],
    speeds: Mapping[str, EdgeSpeed],
    as_json: bool,
    chart: Path | None,
) -> None:
    """Replay each setup on each fleet, one after the other, and print what they did. Raises Failed."""
    began_at = time.monotonic()
    try:
        outcomes = [FleetReplay(trace, one, fleet, speeds).run() for fleet in fleets for one in setups]
    except ValueError as error:  # policies that cannot be built, or an administrator's own that failed
        raise Failed(str(error)) from error
    run_s = time.monotonic() - began_at
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if as_json:
        rows = [asdict(outcome) for outcome in outcomes]
        print_json({"trace": trace.name, "run_s": run_s, "peak_memory_bytes": peak_bytes, "fleets": rows})
    else:
        console().print(_table(outcomes))
        console().print(
            f"{trace.num_requests:,} requests; {about_duration(run_s)}, {about_bytes(peak_bytes)} at most"
        )
    finish(outcomes, chart, trace.name, fleet_chart)


def finish(
    outcomes: Sequence[AnOutcome],
    path: Path | None,
    title: str,
    draw: "Callable[[str, Sequence[AnOutcome]], Figure]",
) -> None:
    """Draw outcomes once they are printed: what took an hour is on the screen, whatever the picture does.

    Raises Failed, also for problems that the audit found.
    """
    if path is not None:
        try:
            save(path, title, draw(title, outcomes))
        except CannotDraw as error:
            raise Failed(f"{path} was not drawn: {error}") from error
        except OSError as error:
            raise Failed(f"cannot write {path}: {error.strerror}") from error
    if any(outcome.problems for outcome in outcomes):
        raise Failed("the audit after the replay found problems; that is a defect, please report it")


def _table(outcomes: Sequence[FleetOutcome]) -> Table:
    shares = (">own", ">other", ">store", ">computed")
    times = ("mean", "p50", "p90", "p99")
    names = (">hosts", *shares, *(f">{name}" for name in times), ">imbalance", ">network")
    table = new_table("route", *names)
    for one in outcomes:
        ratios = (one.own_hit_ratio, one.fetched_ratio, one.stored_ratio, one.computed_ratio)
        table.add_row(
            one.route,
            str(one.num_hosts),
            *(f"{ratio:.1%}" for ratio in ratios),
            *(f"{one.ttft_s.get(name, 0.0):.2f} s" for name in times),
            f"{one.imbalance:.2f}",
            about_bytes(one.network_bytes),
        )
    return table
