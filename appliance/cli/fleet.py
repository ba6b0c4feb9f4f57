"""`kvtier fleet`: the other hosts as one daemon sees them, and what flows."""

from typing import Any

import click
from rich.table import Table
from rich.text import Text

from ...v1 import admin_pb2
from ..config.units import about_bytes, count
from .output import console, plain, print_json
from .target import TIMEOUT_S, Failed, admin, json_option, resolve, target_option

PREFIX = "peer_"
#: Of a host's counters: what is said of it when there is any.
TROUBLES = {"refused": "refused", "broken": "broken off", "wrong_bytes": "sent other bytes", "lost": "lost"}


@click.command()
@target_option
@json_option
def fleet(target: str | None, as_json: bool) -> None:
    """Show the other hosts as a daemon sees them: which are there, what they hold, what came from each.

    The blocks of a host are those that it says it holds, of namespaces that both have. The speed is that of
    the latest fetches from it.

    \b
    Example:
      kvtier fleet
      kvtier fleet --target 10.0.0.1:7070 --json
    """
    address = resolve(target)
    with admin(address) as stub:
        answer = stub.GetStatus(admin_pb2.GetStatusRequest(), timeout=TIMEOUT_S)
    if not answer.hosts:
        raise Failed("this daemon knows no other hosts; name them in `peers.hosts`")
    if as_json:
        print_json({"hosts": [plain(host) for host in answer.hosts], "counters": _counters(answer)})
        return
    screen = console()
    screen.print(hosts_table(answer))
    screen.print(_flow(answer), soft_wrap=True)


def fleet_line(answer: admin_pb2.GetStatusResponse) -> str:
    """Return one line: how many hosts there are, and what came from them."""
    others = [host for host in answer.hosts if host.state != "self"]
    num_live = sum(host.state == "live" for host in others)
    counters = _counters(answer)
    line = f"{num_live} of {count(len(others), 'other host')} live; "
    line += f"received {about_bytes(counters.get('bytes_received', 0))}, "
    return line + f"sent {about_bytes(counters.get('bytes_sent', 0))}"


def _counters(answer: admin_pb2.GetStatusResponse) -> dict[str, int]:
    return {
        name.removeprefix(PREFIX): number
        for name, number in sorted(answer.counters.items())
        if name.startswith(PREFIX)
    }


def hosts_table(answer: admin_pb2.GetStatusResponse) -> Table:
    """Return a row for each host."""
    table = Table(box=None, pad_edge=False)
    for name in ("host", "", "blocks", "fetches", "received", "GB/s", "serves", ""):
        table.add_column(name, justify="left" if name in ("host", "") else "right", no_wrap=name != "")
    for host in answer.hosts:
        table.add_row(*_row(host))
    return table


def _row(host: admin_pb2.HostStatus) -> list[Any]:
    name = f"{host.address} {host.name}".strip()
    if host.state != "live":
        style = "dim" if host.state == "self" else "bold red"
        return [name, Text(host.state, style), "", "", "", "", "", Text(host.problem, style)]
    counters = host.counters
    said = [f"{counters[word]:,} {what}" for word, what in TROUBLES.items() if counters[word]]
    if host.is_paused:
        said.insert(0, "not asked just now")
    return [
        name,
        Text("live", "green"),
        f"{host.num_blocks:,}",
        f"{counters['fetches']:,}",
        about_bytes(counters["bytes"]),
        f"{host.bytes_per_s / 1e9:.2f}" if host.bytes_per_s else "–",
        f"{host.num_tickets} of {host.max_tickets}",
        Text(", ".join(said), "red"),
    ]


def _flow(answer: admin_pb2.GetStatusResponse) -> Text:
    """Return lines about what this host asked for, and what others asked of it."""
    counters, text = _counters(answer), Text(f"\n{fleet_line(answer)}")
    for what, prefix in (("fetches", "fetches_"), ("tickets for others", "tickets_")):
        words = [
            f"{number:,} {name.removeprefix(prefix).replace('_', ' ')}"
            for name, number in counters.items()
            if name.startswith(prefix) and number
        ]
        if words:
            text.append(f"\n  {what}: {', '.join(words)}")
    return text
