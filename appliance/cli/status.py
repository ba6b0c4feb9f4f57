"""`kvtier status`: the tiers drawn to scale, what moves between them, and the counters."""

import threading
import time
from typing import NamedTuple

import click
from rich.console import Group
from rich.table import Table
from rich.text import Text

from ...v1 import admin_pb2
from ..config.units import about_bytes, count, format_duration
from .fleet import fleet_line
from .output import console, legend, name_of_tier, new_table, plain, print_json, spread
from .quantities import duration
from .target import TIMEOUT_S, Failed, NotUpYet, admin, json_option, resolve, target_option

ASK_AGAIN_S = 0.1  # between two tries of --wait
BAR_CELLS = 40
TEXT_CELLS, BACKEND_CELLS = 52, 28  # what stands beside a bar: name, share, bytes, fragments; the backend


class BarPart(NamedTuple):
    """One kind of bytes in a tier's bar."""

    name: str
    mark: str  # tells the kinds apart without colours
    style: str


PINNED = BarPart("pinned", "█", "magenta")
USED = BarPart("used", "▓", "cyan")
RESERVED = BarPart("reserved", "▒", "yellow")
CONDEMNED = BarPart("condemned", "░", "red")
FREE = BarPart("free", "·", "dim")
PARTS = (PINNED, USED, RESERVED, CONDEMNED, FREE)


@click.command()
@click.option(
    "--wait",
    "wait_s",
    type=duration(),
    default="0s",
    help="Ask again until a daemon answers, for this long at most, e.g. 30s.  [default: ask once]",
)
@target_option
@json_option
def status(wait_s: float, target: str | None, as_json: bool) -> None:
    """Show tiers, copies and counters of a running daemon.

    \b
    Example:
      kvtier status
      kvtier serve & kvtier status --wait 30s
      kvtier status --json | jq '.tiers[] | {tier, used_bytes}'
    """
    address, answer = ask(target, wait_s)
    if as_json:
        values = plain(answer)
        for row, tier in zip(values["tiers"], answer.tiers, strict=True):
            row["tier"] = name_of_tier(tier.tier, answer.ladder)
        values["ladder"] = [info.name for info in answer.ladder]
        print_json({"target": address, **values})
        return
    screen = console()
    screen.print(_headline(answer, address))
    screen.print(picture(answer, screen.width))
    if answer.HasField("writes"):
        screen.print(_writes(answer.writes))
    if answer.hosts:
        screen.print(f"\nfleet: {fleet_line(answer)}", soft_wrap=True, highlight=False)
    if answer.HasField("source"):
        screen.print(_source(answer.source), soft_wrap=True)
    if answer.scrubs:
        screen.print(_scrubs(answer))
    if answer.encryption.master_keys:
        screen.print(_master_keys(answer.encryption))
    if answer.edges:
        screen.print(_edges(answer))
    if answer.codec_speeds:
        screen.print(_codecs(answer))
    if answer.counters:
        screen.print(_counters(answer))


def ask(target: str | None, wait_s: float, but_epoch: int = 0) -> tuple[str, admin_pb2.GetStatusResponse]:
    """Return the address and the status of a daemon, of another one than that with `but_epoch`.

    Asks for at most `wait_s` seconds. Raises Failed.
    """
    deadline_at = time.monotonic() + wait_s
    problem: Failed
    while True:
        address = resolve(target)  # anew: without --target the socket's place is known when it is there
        try:
            with admin(address) as stub:
                answer = stub.GetStatus(admin_pb2.GetStatusRequest(), timeout=TIMEOUT_S)
            if answer.epoch != but_epoch:
                return address, answer
            problem = NotUpYet("the daemon that was to end still answers; see its log")
        except NotUpYet as not_up:
            problem = not_up
        except Failed as failed:  # a daemon that ends cancels calls
            if not but_epoch:
                raise
            problem = failed
        left_s = deadline_at - time.monotonic()
        if left_s <= 0:
            raise problem
        threading.Event().wait(min(ASK_AGAIN_S, left_s))


def cells(tier: admin_pb2.TierStatus, width: int) -> list[tuple[BarPart, int]]:
    """Return how many of `width` cells each part takes."""
    pinned = min(tier.pinned_bytes, tier.used_bytes)
    sizes = [pinned, tier.used_bytes - pinned, tier.reserved_bytes, tier.condemned_bytes]
    counts = spread(sizes, max(tier.capacity_bytes, sum(sizes)), width)
    return list(zip(PARTS, [*counts, width - sum(counts)], strict=True))


def picture(answer: admin_pb2.GetStatusResponse, width: int) -> Group:
    """Return the tiers drawn to scale, with the legend, for a screen of `width` columns.

    Where it is narrow the bars are shorter and the backends are left out. (The demo ends with it, too.)
    """
    with_backend = width >= BAR_CELLS + TEXT_CELLS + BACKEND_CELLS
    bar_cells = max(8, min(BAR_CELLS, width - TEXT_CELLS))
    return Group(_tiers(answer, bar_cells, with_backend), legend(PARTS))


def _headline(answer: admin_pb2.GetStatusResponse, address: str) -> Text:
    text = Text.assemble(("kvtier ", "bold"), (answer.version, "bold"), f" at {address}")
    text.append(f", up {format_duration(round(answer.uptime_s))}")
    if answer.draining:
        text.append("  DRAINING", "bold red")
    if answer.policy.generation:
        text.append(f", policy generation {answer.policy.generation}")
    if answer.policy.last_error:
        text.append(f"\nthe policy file is refused: {answer.policy.last_error}", "bold red")
    if answer.encryption.last_error:
        text.append(f"\nthe master key file is refused: {answer.encryption.last_error}", "bold red")
    counts = (
        (answer.num_blocks, "block"),
        (answer.num_namespaces, "namespace"),
        (answer.num_clients, "client"),
        (answer.num_sessions, "session"),
        (answer.num_leases, "lease"),
    )
    text.append("\n" + ", ".join(count(number, noun) for number, noun in counts) + "\n")
    return text


def _tiers(answer: admin_pb2.GetStatusResponse, bar_cells: int, with_backend: bool) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(no_wrap=True)
    for _ in range(3):
        table.add_column(justify="right", no_wrap=True)
    table.add_column(style="dim", no_wrap=True)
    for tier in answer.tiers:
        bar = Text.assemble(*[(part.mark * count, part.style) for part, count in cells(tier, bar_cells)])
        taken = tier.used_bytes + tier.reserved_bytes + tier.condemned_bytes
        table.add_row(
            Text(name_of_tier(tier.tier, answer.ladder)).append(" OFFLINE" * tier.is_offline, "bold red"),
            bar,
            f"{taken / (tier.capacity_bytes or 1):.0%}",
            f"{about_bytes(taken)} of {about_bytes(tier.capacity_bytes)}",
            f"{tier.num_fragments:,} fragments",
            tier.backend if with_backend else "",
        )
    return table


def _writes(writes: admin_pb2.WriteStatus) -> Text:
    """Return one line: what a death of the process would take, and what the device takes."""
    text = Text(f"\nonly in memory: {writes.num_blocks_only_in_memory:,} blocks, ")
    text.append(f"{about_bytes(writes.only_in_memory_bytes)}; written to nvme in 24 h: ")
    text.append(about_bytes(writes.written_bytes))
    if not writes.HasField("daily_bytes"):
        return text.append(f" (write: {writes.mode}, no limit)")
    text.append(f" (write: {writes.mode}, {about_bytes(writes.left_bytes)} left of ")
    text.append(f"{about_bytes(writes.daily_bytes)} a day)")
    if writes.is_overdrawn:
        text.append("  more than tiers.nvme.daily_writes", "bold red")
    return text


def _source(source: admin_pb2.SourceStatus) -> Text:
    """Return lines about the object store: whether it is asked, what came and went, and the bill."""
    text = Text(f"\nobject store {source.address}: ")
    if source.is_open:
        text.append(f"in use, {source.num_in_flight} of {source.max_in_flight} in flight")
        if source.problem:
            text.append(f"; takes nothing: {source.problem}", "bold red")
    else:
        text.append(f"not in use: {source.problem or 'not tried yet'}", "bold red")
    text.append(f"\n  received {about_bytes(source.received_bytes)}, {source.num_blocks_fetched:,} blocks; ")
    text.append(f"sent {about_bytes(source.sent_bytes)} (share: {source.share}, ")
    text.append(f"{about_bytes(source.exported_day_bytes)} in 24 h")
    text.append(f" of {about_bytes(source.daily_bytes)})" if source.HasField("daily_bytes") else ")")
    for name, counts in (("fetches", source.fetches), ("exports", source.exports)):
        if words := [f"{number:,} {word.replace('_', ' ')}" for word, number in counts.items() if number]:
            text.append(f"\n  {name}: {', '.join(sorted(words))}")
    if source.day_dollars:
        bill = ", ".join(f"{word} ${dollars:,.4f}" for word, dollars in sorted(source.day_dollars.items()))
        text.append(f"\n  bill of 24 h: ${sum(source.day_dollars.values()):,.4f} ({bill})")
    return text


def _scrubs(answer: admin_pb2.GetStatusResponse) -> Text:
    """Return a line for each tier: when it was verified whole, and what was found."""
    text = Text()
    for one in answer.scrubs:
        text.append(f"\nverified {one.tier}: ")
        if one.num_passes:
            text.append(f"{about_bytes(one.last_bytes)} in {format_duration(round(one.last_took_s))}, ")
            text.append(f"ended {format_duration(round(one.last_ended_s_ago))} ago")
        else:
            text.append("not yet")
        if one.share_done:
            text.append(f"; the pass under way is at {one.share_done:.0%}")
        if one.num_damaged:
            text.append(f"; {one.num_damaged:,} fragments were damaged: see the log", "bold red")
    return text


def _edges(answer: admin_pb2.GetStatusResponse) -> Table:
    numbers = (">copies", ">failed", ">in flight", ">queued", ">bytes", ">GB/s", ">latency")
    table = new_table("edge", *numbers, title="\ncopies")
    for edge in answer.edges:
        table.add_row(
            f"{edge.source} → {edge.target}",
            f"{edge.num_copies:,}",
            Text(f"{edge.num_failed:,}", "red" if edge.num_failed else ""),
            f"{edge.num_in_flight:,}",
            f"{edge.num_queued:,}",
            about_bytes(edge.bytes),
            f"{edge.bandwidth_bytes_per_s / 1e9:.2f}" if edge.bandwidth_bytes_per_s else "–",
            f"{edge.latency_s * 1e3:.2f} ms" if edge.latency_s else "–",
        )
    return table


def _master_keys(encryption: admin_pb2.EncryptionStatus) -> Table:
    table = new_table("id", "", ">wraps", title="\nmaster keys")
    for key in encryption.master_keys:
        old = "still needed" if key.num_wrapped else "not needed by this store any more"
        table.add_row(key.id, "in force" if key.is_current else old, f"{key.num_wrapped:,}")
    return table


def _codecs(answer: admin_pb2.GetStatusResponse) -> Table:
    table = new_table("codec", "of", ">decodes", title="\ncodecs")
    for one in answer.codec_speeds:
        speed = f"{one.decode_bytes_per_s / 1e9:.1f} GB/s" if one.decode_bytes_per_s else "not"
        table.add_row(one.codec, one.dtype, speed)
    return table


def _counters(answer: admin_pb2.GetStatusResponse) -> Table:
    table = new_table("counter", ">value", title="\ncounters")
    table.show_header = False
    for name in sorted(answer.counters):
        table.add_row(name, f"{answer.counters[name]:,}")
    return table
