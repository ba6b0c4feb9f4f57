"""`kvtier top`: the appliance live in the terminal.

Asks for a snapshot over the admin API once an interval and draws it: the same value as the page in the
browser (docs/web-api.md), so both say the same. What does not fit the screen is cut, never scrolled.
"""

import contextlib
import json
import math
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TextIO

import click
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ...v1 import admin_pb2
from ..config.units import about_bytes, about_duration, count, format_duration
from .output import console, legend, new_table, print_json, spread
from .quantities import duration
from .target import TIMEOUT_S, admin, json_option, resolve, target_option

MIN_INTERVAL_S, MAX_INTERVAL_S = 0.2, 3600.0
HISTORY = 60  # samples shown, one a second
LEAVING = ("q", "Q")
BAR_CELLS, MIN_TIER_CELLS, FLOW_CELLS = 48, 6, 12
SPARKS = "▁▂▃▄▅▆▇█"
#: What stands for bytes in a tier's bar, told apart by mark and by colour.
PARTS = {
    "decoding": ("█", "bright_red"),
    "prefill": ("▓", "yellow"),
    "queued": ("▒", "green"),
    "waiting": ("░", "cyan"),
    "idle": ("▪", "blue"),
    "ended": ("▫", "bright_black"),
    "none": ("▧", "white"),
    "moving": ("▞", "magenta"),
}


@click.command()
@click.option(
    "--interval",
    default="1s",
    show_default=True,
    type=duration(MIN_INTERVAL_S, MAX_INTERVAL_S),
    help="Time between two looks, 200ms to 1h.",
)
@click.option("--once", is_flag=True, help="Draw once and leave.")
@target_option
@json_option
def top(interval: float, once: bool, target: str | None, as_json: bool) -> None:
    """Watch tiers, traffic, sessions and decisions as they happen. `q` or Ctrl-C leaves.

    \b
    Example:
      kvtier top
      kvtier top --once
      kvtier top --once --json | jq .totals.hit_ratio
    """
    address = resolve(target)
    request = admin_pb2.GetSnapshotRequest(num_samples=HISTORY)
    with admin(address) as stub:

        def look() -> Any:
            return json.loads(stub.GetSnapshot(request, timeout=TIMEOUT_S).json)

        screen = console()
        if as_json:
            print_json(look())
        elif once or not screen.is_terminal:
            screen.print(picture(look(), screen.width))
        else:
            _watch(screen, look, interval)


def _watch(screen: Console, look: Any, interval_s: float) -> None:
    """Draw until `q` or Ctrl-C is pressed, or SIGTERM comes; then the terminal is as it was before."""
    with contextlib.suppress(KeyboardInterrupt), leaving_at_sigterm(), keys(sys.stdin) as wait:
        live = Live(picture(look(), screen.width), console=screen, screen=True, auto_refresh=False)
        try:  # not `with live`: interrupted while it starts, that would leave its screen behind
            live.start(refresh=True)
            while wait(interval_s) not in LEAVING:
                live.update(picture(look(), screen.width), refresh=True)
        finally:
            live.stop()


@contextlib.contextmanager
def keys(terminal: TextIO) -> Iterator[Callable[[float], str]]:
    """Yield a function that waits so many seconds, or until one of LEAVING was pressed.

    Keys arrive without Return meanwhile. The function returns that key, or "". A signal with a handler counts
    as one of them: Python calls the handler between two bytecodes, and one that arrives right before `select`
    would not interrupt it.
    """
    with signals() as signalled:
        if not terminal.isatty():
            yield lambda seconds: LEAVING[0] if select.select([signalled], [], [], seconds)[0] else ""
            return
        number = terminal.fileno()

        def wait(seconds: float) -> str:
            until = time.monotonic() + seconds
            while (left_s := until - time.monotonic()) > 0:
                ready = select.select([number, signalled], [], [], left_s)[0]
                if signalled in ready:
                    return LEAVING[0]
                if ready:
                    key = os.read(number, 1).decode("ascii", "replace")
                    if not key or key in LEAVING:  # nothing: the terminal is gone
                        return key or LEAVING[0]
            return ""

        before = termios.tcgetattr(number)
        try:
            tty.setcbreak(number, termios.TCSADRAIN)
            yield wait
        finally:
            termios.tcsetattr(number, termios.TCSADRAIN, before)


@contextlib.contextmanager
def signals() -> Iterator[int]:
    """Yield a descriptor that is readable once a signal that has a Python handler has arrived."""
    ours, theirs = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    before = signal.set_wakeup_fd(theirs, warn_on_full_buffer=False)
    try:
        yield ours
    finally:
        signal.set_wakeup_fd(before)
        os.close(ours)
        os.close(theirs)


@contextlib.contextmanager
def leaving_at_sigterm() -> Iterator[None]:
    """Let SIGTERM end this the way Ctrl-C does, so that the terminal is restored."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def picture(snapshot: dict[str, Any], width: int) -> Group:
    """Return the snapshot as it is drawn on a screen of `width` columns."""
    return Group(
        _headline(snapshot),
        _tiers(snapshot["tiers"], min(BAR_CELLS, max(16, width - 60))),
        legend(("no session" if name == "none" else name, *part) for name, part in PARTS.items())
        .append("·", "dim")
        .append(" free"),
        Text(),
        _flows(snapshot["edges"]),
        Text(),
        _sessions(snapshot["sessions"]["latest"][:8], snapshot["totals"]["found"]),
        Text(),
        _decisions(snapshot["decisions"][:8], snapshot["uptime_s"]),
    )


def tier_cells(tiers: list[dict[str, Any]], cells: int) -> list[int]:
    """Return how wide each tier's bar is: to scale as far as that can be seen, the widest has all `cells`."""
    widest = max((tier["capacity_bytes"] for tier in tiers), default=0) or 1
    return [max(MIN_TIER_CELLS, round(cells * tier["capacity_bytes"] / widest)) for tier in tiers]


def sparks(values: list[float | None]) -> str:
    """Return shares of 0 to 1 as a line of small bars; a space where there is none."""
    return "".join(" " if v is None else SPARKS[min(len(SPARKS) - 1, int(v * len(SPARKS)))] for v in values)


def _headline(snapshot: dict[str, Any]) -> Text:
    totals, counts = snapshot["totals"], snapshot["counts"]
    state = snapshot["state"]
    text = Text.assemble(("kvtier ", "bold"), (snapshot["version"], "bold"))
    text.append(f"  {state}", "green" if state == "serving" else "bold red")
    text.append(
        f"  up {format_duration(round(snapshot['uptime_s']))}, policy {snapshot['policy']['generation']}"
    )
    text.append(
        "".join(f", {count(counts[f'{noun}s'], noun)}" for noun in ("block", "client", "session")) + "\n"
    )
    ratio = totals["hit_ratio"]
    text.append("hits ").append(f"{ratio:.1%}" if ratio is not None else "–", "bold")
    text.append(f" of {totals['asked']:,} blocks ")
    text.append(sparks(snapshot["history"]["hit_ratio"]), "green")
    text.append(f"  saved {about_duration(totals['saved_s'])} of prefill, {totals['evicted']:,} evicted\n")
    return text


def _tiers(tiers: list[dict[str, Any]], cells: int) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(no_wrap=True)
    for _ in range(2):
        table.add_column(justify="right", no_wrap=True)
    for tier, width in zip(tiers, tier_cells(tiers, cells), strict=True):
        by_urgency = tier["bytes_by_urgency"]
        taken = tier["used_bytes"] + tier["reserved_bytes"] + tier["condemned_bytes"]
        counts = spread([*by_urgency.values(), taken - tier["used_bytes"]], tier["capacity_bytes"], width)
        parts = [PARTS[name] for name in (*by_urgency, "moving")]
        bar = Text.assemble(*[(mark * n, style) for n, (mark, style) in zip(counts, parts, strict=True)])
        bar.append("·" * (width - sum(counts)), "dim")
        table.add_row(
            tier["tier"] + (" OFFLINE" if tier["is_offline"] else ""),
            bar,
            f"{taken / (tier['capacity_bytes'] or 1):.0%}",
            f"{about_bytes(taken)} of {about_bytes(tier['capacity_bytes'])}",
        )
    return table


def _flows(edges: list[dict[str, Any]]) -> Table:
    """Return the edges, arrows as long as their traffic is a share of the busiest."""
    table = new_table("edge", "traffic", ">now", ">so far", ">queued", ">p99")
    busiest = max((edge["bytes_per_s"] for edge in edges), default=0) or 1
    for edge in edges:
        cells = math.ceil(FLOW_CELLS * edge["bytes_per_s"] / busiest)
        table.add_row(
            f"{edge['source']} → {edge['target']}",
            Text("━" * (cells - 1) + "▶" if cells else "", "cyan"),
            f"{about_bytes(edge['bytes_per_s'])}/s" if edge["bytes_per_s"] else "–",
            about_bytes(edge["bytes"]),
            f"{edge['num_queued']:,}",
            about_duration(edge["p99_s"]) if edge["p99_s"] is not None else "–",
        )
    return table


def _sessions(sessions: list[dict[str, Any]], tiers: Iterable[str]) -> Table:
    """Return the sessions, and how many of their blocks are in each of these tiers."""
    places = (*tiers, "gone")
    numbers = (f">{name}" for name in (*places, "hits", "read", "saved", "silent"))
    table = new_table("session", "urgency", *numbers)
    table.columns[0].max_width = 28
    for session in sessions:
        ratio = session["hit_ratio"]
        table.add_row(
            Text(session.get("name", f"#{session['number']}")),
            Text(session["urgency"], PARTS[session["urgency"]][1]),
            *[f"{session['blocks'][tier]:,}" for tier in places],
            f"{ratio:.0%}" if ratio is not None else "–",
            about_bytes(session["read_bytes"]),
            about_duration(session["saved_s"]),
            format_duration(round(session["idle_s"])),
        )
    return table


def _decisions(decisions: list[dict[str, Any]], uptime_s: float) -> Table:
    table = new_table(">ago", "decision", ">blocks", "because", ">price", ">next")
    for decision in decisions:
        prices = [f"{p:.4g}" if p is not None else "–" for p in (decision["price"], decision["next_price"])]
        table.add_row(
            format_duration(round(max(0.0, uptime_s - decision["at_s"]))),
            decision["what"],
            f"{decision['num_blocks']:,}",
            Text(decision["why"]),
            *prices,
        )
    return table
