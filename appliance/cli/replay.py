"""`kvtier replay`: run policies over a recorded trace and report hits, times and bytes moved."""

import json
import os
from collections.abc import Sequence
from dataclasses import replace as replace_fields
from pathlib import Path
from typing import Any, get_args

import click
from click.core import ParameterSource
from rich.progress import TaskID

from ...policies.registry import UnknownPolicy
from ...tiers.block import Tier
from ...tiers.ladder import STANDARD, Ladder, with_memory
from ..config import SettingsError
from ..config.units import parse_bytes
from ..core.copying.source_speed import STORE_LATENCY_S
from ..core.options import PlannerOptions, WriteMode
from ..observability.pictures import check_target
from ..replay import report
from ..replay.chart import hit_chart
from ..replay.hints import Hints, with_hints
from ..replay.outcomes import Outcome
from ..replay.readers import read_trace
from ..replay.setups import UNBOUNDED, ModelShape, Setup, choice_of, require_room, single_tier
from ..replay.sweep import run_setups
from ..replay.traces import Trace, TraceError
from ..replay.virtual import EdgeSpeed, default_speeds
from ..replay.virtual_store import StoreModel
from .output import console, print_json, progress_bar
from .replay_fleet import ROUTES, finish, fleet_setups, replay_fleet
from .target import Failed, json_option


def trace_options(command: Any) -> Any:
    """Give `command` the options that say how a trace is read and what its blocks are."""
    options = (
        click.option("--first", type=click.IntRange(1), help="Replay only this many requests."),
        click.option(
            "--block-tokens",
            default=0,
            type=click.IntRange(0, 1 << 20),
            help="Tokens a block.  [default: what the trace's format says]",
        ),
        click.option(
            "--content-ids", is_flag=True, help="Ids name what a block holds, not also what stands before it."
        ),
        click.option(
            "--model",
            default="32x8x128:float16",
            show_default=True,
            metavar="NAME[:fp8]|LAYERSxHEADSxDIM[:DTYPE]",
            help="Model, for bytes and prefill time of blocks that the trace gives no size of: of the"
            " catalogue (docs/models.md), e.g. llama-3.1-70b or glm-5:fp8,"
            " or layers, KV heads and head dimension.",
        ),
        click.option(
            "--prefill-speed",
            default=0.0,
            type=click.FloatRange(0, 1e12),
            help="Prompt tokens a second at the start of a context.  [default: of one accelerator, by the"
            " model's FLOPs]",
        ),
        click.option("--layers-per-group", default=0, help="Layers that move together; 0: all."),
        click.option(
            "--edge",
            "edges",
            multiple=True,
            metavar="SOURCE>TARGET=SPEED[@LATENCY]",
            help="What an edge can do, e.g. 'nvme>dram=6GB/s@120us'. May be repeated.",
        ),
        click.option(
            "--edges-from",
            type=click.Path(path_type=Path, exists=True, dir_okay=False),
            help="Measured edges: what `kvtier status --json` printed.",
        ),
        click.option("--jobs", type=click.IntRange(1), help="Processes.  [default: one per processor]"),
    )
    for option in reversed(options):
        command = option(command)
    return command


@click.command()
@click.argument("trace_path", metavar="TRACE", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option(
    "--policy",
    "policies",
    multiple=True,
    default=("lru",),
    show_default=True,
    metavar="NAME",
    help="EVICTION[+ADMISSION][@PREFETCH], unbounded, or a settings file. May be repeated.",
)
@click.option(
    "--capacity",
    default="1%,5%,10%,20%",
    show_default=True,
    help="Sizes of one memory tier: shares of the trace's distinct blocks, or bytes.",
)
@click.option(
    "--tiers",
    "tiers",
    multiple=True,
    metavar="TIER=BYTES,…",
    help="Several tiers on a virtual clock instead, e.g. dram=64GiB,nvme=1TiB. Further host memory between"
    " them: cxl:memory=128GiB. May be repeated.",
)
@click.option(
    "--write",
    type=click.Choice(get_args(WriteMode)),
    default="idle",
    show_default=True,
    help="With --tiers: when blocks are copied into nvme, as `tiers.nvme.write` says.",
)
@click.option(
    "--object",
    "stores",
    multiple=True,
    metavar="SIZE@SPEED[@LATENCY]",
    help="With --tiers: also with an object store under them, e.g. '1TiB@1GB/s@30ms'. May be repeated.",
)
@click.option(
    "--hosts",
    "num_hosts",
    multiple=True,
    type=click.IntRange(1, 1024),
    help="With one of --tiers: replay over so many hosts, each with these tiers. May be repeated.",
)
@click.option(
    "--route",
    "routes",
    multiple=True,
    type=click.Choice(ROUTES),
    help="With --hosts: how prompts are spread. May be repeated.  [default: all]",
)
@click.option(
    "--network",
    metavar="SPEED[@LATENCY]",
    help="With --hosts: they fetch from each other, each sends and receives at SPEED, e.g. '2GB/s@5ms'.",
)
@click.option(
    "--hints",
    type=click.Choice(get_args(Hints)),
    help="Sessions say after each request when they are back, or that they have ended: right, or off by a"
    " factor and now and then wrong.",
)
@trace_options
@click.option(
    "--chart", type=click.Path(path_type=Path, dir_okay=False), help="Write a picture: .png, .svg or .html."
)
@json_option
def replay(
    trace_path: Path,
    policies: Sequence[str],
    capacity: str,
    tiers: Sequence[str],
    write: WriteMode,
    stores: Sequence[str],
    num_hosts: Sequence[int],
    routes: Sequence[str],
    network: str | None,
    hints: Hints | None,
    first: int | None,
    block_tokens: int,
    content_ids: bool,
    model: str,
    layers_per_group: int,
    prefill_speed: float,
    edges: Sequence[str],
    edges_from: Path | None,
    jobs: int | None,
    chart: Path | None,
    as_json: bool,
) -> None:
    """Run the daemon's own planner over TRACE on virtual tiers, and print what it did.

    TRACE is JSONL as Mooncake or Bailian publish it, or a recording of `kvtier record`; plain or gzip. With
    --capacity it is one memory tier and takes no time: hit ratios. With --tiers copies and prefill take their
    time: also time to first token, bytes moved, writes a day.

    \b
    Example:
      kvtier replay trace.jsonl.gz --policy lru --policy urgency --capacity 1%,5%,64GiB --chart hits.png
      kvtier replay trace.jsonl.gz --policy urgency --policy clairvoyant --policy unbounded
      kvtier replay agents.jsonl.gz --policy urgency --hints clairvoyant
      kvtier replay trace.jsonl.gz --policy lru --policy urgency --model glm-5:fp8 --capacity 512GiB,1TiB
      kvtier replay monday.jsonl.gz --policy policy.yaml --tiers dram=256GiB,nvme=4TiB --json
    """
    try:
        if chart is not None:
            check_target(chart)
        shape = ModelShape.parse(model, layers_per_group, prefill_speed)
        if tiers:
            _refuse_mixtures(policies)
        sizes = [tier_sizes(text) for text in tiers]
        speeds = speeds_of(edges, edges_from, [ladder for ladder, _ in sizes])
        trace = read(trace_path, block_tokens, content_ids, first, hints)
        if tiers:
            setups = _timed_setups(policies, list(zip(tiers, sizes, strict=True)), write, trace, shape)
            setups += [_with_store(setup, text) for text in stores for setup in setups]
        elif stores:
            raise ValueError("--object is what lies under --tiers; name them, too")
        else:
            setups = _untimed_setups(policies, capacity, trace, shape)
        fleets = fleet_setups(num_hosts, routes, network, setups)
    except (ValueError, UnknownPolicy, SettingsError) as error:
        raise click.UsageError(str(error)) from error
    if fleets:
        return replay_fleet(trace, setups, fleets, speeds, as_json, chart)
    return _report(trace, run(trace, setups, jobs, speeds), as_json, chart)


def _report(trace: Trace, outcomes: Sequence[Outcome], as_json: bool, chart: Path | None) -> None:
    """Print outcomes, then draw them. Raises Failed, also for problems that the audit found."""
    if as_json:
        print_json(report.plain(trace, outcomes))
    else:
        console().print(report.tables(trace, outcomes))
    finish(outcomes, chart, trace.name, hit_chart)


def _timed_setups(
    policies: Sequence[str],
    sizes: Sequence[tuple[str, tuple[Ladder, dict[Tier, int]]]],
    write: WriteMode,
    trace: Trace,
    shape: ModelShape,
) -> list[Setup]:
    """Return a setup on a virtual clock for each of `sizes` (label, ladder, bytes by tier) and policy. Raises
    ValueError where a tier is too small for the blocks of the trace."""
    for _, (ladder, size) in sizes:
        require_room(size, trace, shape, ladder)
    return [
        Setup(
            policy,
            label,
            choice_of(policy),
            size,
            PlannerOptions(
                write=write, daily_write_bytes=size.get(ladder.log_tier)
            ),  # as a daemon's by default
            shape,
            is_timed=True,
            ladder=ladder,
        )
        for label, (ladder, size) in sizes
        for policy in policies
    ]


def _with_store(setup: Setup, text: str) -> Setup:
    """Return a setup with an object store under its tiers. Raises ValueError."""
    size, _, speed = text.partition("@")
    if not speed:
        raise ValueError(f"{text!r} is no object store; write SIZE@SPEED[@LATENCY], e.g. 1TiB@1GB/s@30ms")
    model = StoreModel(parse_bytes(size), *EdgeSpeed.parse(speed, STORE_LATENCY_S))
    return replace_fields(setup, capacity=f"{setup.capacity} object={text}", store=model)


def _untimed_setups(policies: Sequence[str], capacity: str, trace: Trace, shape: ModelShape) -> list[Setup]:
    """Return a setup of one tier without time for each size in `capacity` and policy; UNBOUNDED once.
    Raises ValueError for a size that cannot be read."""
    setups = [
        single_tier(policy, size.strip(), trace, shape)
        for size in capacity.split(",")
        for policy in policies
        if policy != UNBOUNDED
    ]
    return setups + [single_tier(policy, "100%", trace, shape) for policy in policies if policy == UNBOUNDED]


def _refuse_mixtures(policies: Sequence[str]) -> None:
    """Raise ValueError when something beside --tiers means one tier without time."""
    source = click.get_current_context().get_parameter_source("capacity")
    if source is not ParameterSource.DEFAULT:
        raise ValueError("--capacity is one tier without time, --tiers several on a clock; name one of them")
    if UNBOUNDED in policies:
        raise ValueError(f"{UNBOUNDED} is a bound for --capacity; --tiers say how much room there is")


def read(
    path: Path, block_tokens: int, content_ids: bool, first: int | None, hints: Hints | None = None
) -> Trace:
    """Read a trace with a bar of progress; its sessions give `hints`. Raises Failed."""
    try:
        with progress_bar() as progress:
            task = progress.add_task(f"reading {path.name}", total=path.stat().st_size)
            trace = read_trace(
                path, block_tokens, lambda done: progress.update(task, completed=done), content_ids
            )
    except (TraceError, OSError) as error:
        raise Failed(str(error)) from error
    trace = with_hints(trace, hints) if hints else trace
    return trace.stretch(0, min(first, trace.num_requests)) if first else trace


def run(
    trace: Trace, setups: Sequence[Setup], jobs: int | None, speeds: dict[str, EdgeSpeed]
) -> list[Outcome]:
    """Replay with a bar of progress per setup. Raises Failed."""
    with progress_bar() as progress:
        tasks: list[TaskID] = [progress.add_task(setup.label, total=trace.num_requests) for setup in setups]

        def advance(done: Sequence[int]) -> None:
            for task, count in zip(tasks, done, strict=True):
                progress.update(task, completed=count)

        try:
            return run_setups(trace, setups, jobs or os.cpu_count() or 1, speeds, advance)
        except ValueError as error:  # policies that cannot be built, or an administrator's own that failed
            raise Failed(str(error)) from error


def tier_sizes(text: str) -> tuple[Ladder, dict[Tier, int]]:
    """Return the ladder and bytes by tier of `dram=64GiB,cxl:memory=128GiB,nvme=1TiB`.

    Raises ValueError."""
    sizes: dict[str, int] = {}
    further: list[str] = []
    for part in text.split(","):
        name, _, size = part.strip().partition("=")
        name, _, kind = name.partition(":")
        if kind == "memory":
            further.append(name)
        elif kind or name not in (spec.name for spec in STANDARD.specs):
            known = ", ".join(spec.name for spec in STANDARD.specs)
            raise ValueError(f"{part!r}: write TIER=BYTES with a tier of {known}, or NAME:memory=BYTES")
        if name in sizes:
            raise ValueError(f"{text!r} names {name} twice")
        sizes[name] = parse_bytes(size)
    ladder = with_memory(further)
    if ladder.put_tier.label not in sizes:
        raise ValueError(f"{text!r} has no {ladder.put_tier.label}; every put lands there")
    return ladder, {ladder.named(name): size for name, size in sizes.items()}


def speeds_of(
    edges: Sequence[str], measured: Path | None, ladders: Sequence[Ladder] = ()
) -> dict[str, EdgeSpeed]:
    """Return the edges that were named, over those that were measured. Raises ValueError."""
    known = {name: speed for one in (STANDARD, *ladders) for name, speed in default_speeds(one).items()}
    speeds: dict[str, EdgeSpeed] = {}
    if measured is not None:
        try:
            found = json.loads(measured.read_text("utf-8"))["edges"]
            for edge in found:
                if edge["bandwidth_bytes_per_s"] > 0:
                    name = f"{edge['source']}>{edge['target']}"
                    speeds[name] = EdgeSpeed(float(edge["bandwidth_bytes_per_s"]), float(edge["latency_s"]))
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"{measured} is not what `kvtier status --json` prints: {error!r}") from error
    for text in edges:
        name, _, speed = text.partition("=")
        if name not in known:
            raise ValueError(f"no edge {name!r}; known: {', '.join(known)}")
        speeds[name] = EdgeSpeed.parse(speed, known[name].latency_s)
    return speeds
