"""`kvtier fleet`: the other hosts as one daemon sees them, what flows, and which should get a prompt."""

from typing import Any

import click
from click.core import ParameterSource
from rich.table import Table
from rich.text import Text

from ...v1 import admin_pb2, kvcache_pb2
from ...v1.kvcache_pb2_grpc import KVCacheServiceStub
from ...v1.shm import HASH_BYTES
from ..config.units import about_bytes, about_duration, count
from ..counters import of_prefix
from .output import console, new_table, plain, print_json
from .target import TIMEOUT_S, Failed, admin, called, json_option, resolve, target_option

#: Of a host's counters: what is said of it when there is any.
TROUBLES = {"refused": "refused", "broken": "broken off", "wrong_bytes": "sent other bytes", "lost": "lost"}


@click.group(invoke_without_command=True)
@target_option
@json_option
@click.pass_context
def fleet(context: click.Context, target: str | None, as_json: bool) -> None:
    """Show the other hosts as a daemon sees them: which are there, what they hold, what came from each.

    The blocks of a host are those that it says it holds, of namespaces that both have. The speed is that of
    the latest fetches from it.

    \b
    Example:
      kvtier fleet
      kvtier fleet --target 10.0.0.1:7070 --json
    """
    if context.invoked_subcommand is not None:
        sources = [context.get_parameter_source(name) for name in ("target", "as_json")]
        if ParameterSource.COMMANDLINE in sources:
            raise click.UsageError(f"write options behind `{context.invoked_subcommand}`")
        return
    address = resolve(target)
    with admin(address) as stub:
        answer = stub.GetStatus(admin_pb2.GetStatusRequest(), timeout=TIMEOUT_S)
    if not (answer.hosts or answer.HasField("directory")):
        raise Failed("this daemon knows no other hosts; name them in `peers.hosts`")
    if as_json:
        directory = plain(answer.directory) if answer.HasField("directory") else None
        hosts = [plain(host) for host in answer.hosts]
        print_json({"hosts": hosts, "directory": directory, "counters": _counters(answer)})
        return
    screen = console()
    screen.print(hosts_table(answer))
    screen.print(_flow(answer), soft_wrap=True)
    if answer.HasField("directory"):
        screen.print(_directory_line(answer.directory), soft_wrap=True)


@fleet.command()
@click.argument("namespace", type=click.IntRange(1))
@click.argument("names", nargs=-1, required=True, metavar="HASH...")
@click.option("--queue", "queues", multiple=True, metavar="HOST=SECONDS", help="A host to choose from.")
@target_option
@json_option
def rank(
    namespace: int, names: tuple[str, ...], queues: tuple[str, ...], target: str | None, as_json: bool
) -> None:
    """Say which host should get a prompt of NAMESPACE with these blocks, the best one first.

    NAMESPACE is its number at the daemon that is asked, of `kvtier inspect namespace all`; an administrator
    may ask of any, a tenant of its own. HASH is the prefix hash of a block in 64 hexadecimal digits, in the
    order of the prompt from its first block on. With --queue only the hosts it names are compared, each with
    the seconds of prefill that run and wait there.

    \b
    Example:
      kvtier fleet rank 3 $(cat names.txt)
      kvtier fleet rank 3 $(cat names.txt) --queue 10.0.0.1:7070=0.8 --queue 10.0.0.2:7070=0
    """
    request = kvcache_pb2.RankRequest(
        namespace_id=namespace,
        prefix_hashes=b"".join(map(_name, names)),
        candidates=[_candidate(one) for one in queues],
    )
    address = resolve(target)
    with called(KVCacheServiceStub, address) as stub:
        answer = stub.Rank(request, timeout=TIMEOUT_S)
    if as_json:
        print_json(plain(answer))
        return
    screen = console()
    screen.print(rank_table(answer))
    screen.print(
        f"\ncomputing all {count(answer.num_blocks, 'block')} takes {about_duration(answer.recompute_s)}"
        + (", a guess: no prefill was measured or stated" if answer.is_guess else ""),
        soft_wrap=True,
    )


def _name(text: str) -> bytes:
    try:
        name = bytes.fromhex(text)
    except ValueError:
        name = b""
    if len(name) != HASH_BYTES:
        raise click.UsageError(f"{text!r} is no prefix hash; write {2 * HASH_BYTES} hexadecimal digits")
    return name


def _candidate(text: str) -> kvcache_pb2.RankCandidate:
    host, _, seconds = text.rpartition("=")
    try:
        return kvcache_pb2.RankCandidate(host=host, queue_s=float(seconds))
    except ValueError:
        raise click.UsageError(f"--queue {text!r}: write HOST=SECONDS, such as 10.0.0.1:7070=0.8") from None


def rank_table(answer: kvcache_pb2.RankResponse) -> Table:
    """Return a row for each host of a ranking."""
    counted = (">memory", ">disk", ">tier unknown", ">fetched", ">computed")
    table = new_table("host", ">first token", *counted, ">queue", "")
    for host in answer.hosts:
        words = [
            word
            for word, is_so in (
                ("this one", host.is_self),
                ("nothing is known of it", not host.is_known),
                ("draining", host.load.is_draining),
            )
            if is_so
        ]
        counts = host.num_in_memory, host.num_on_disk, host.num_in_unknown_tier
        table.add_row(
            f"{host.address} {host.name}".strip(),
            about_duration(host.first_token_s),
            *(f"{number:,}" for number in (*counts, host.num_fetched, host.num_computed)),
            about_duration(host.queue_s),
            ", ".join(words),
        )
    return table


def fleet_line(answer: admin_pb2.GetStatusResponse) -> str:
    """Return one line: how many hosts there are, and what came from them."""
    others = [host for host in answer.hosts if host.state != "self"]
    num_live = sum(host.state == "live" for host in others)
    counters = _counters(answer)
    line = f"{num_live} of {count(len(others), 'other host')} live; "
    line += f"received {about_bytes(counters.get('bytes_received', 0))}, "
    return line + f"sent {about_bytes(counters.get('bytes_sent', 0))}"


def _directory_line(directory: admin_pb2.DirectoryStatus) -> Text:
    """Return whether the directory answers, and what it has."""
    if directory.problem:
        return Text(f"\ndirectory {directory.address}: {directory.problem}", "bold red")
    line = f"\ndirectory {directory.address} answers, and named {count(directory.num_hosts, 'other host')}"
    if directory.has_index:
        line += f"; its index has {count(directory.num_indexed, 'bundle')} of this host"
        line += "" if directory.is_index_up else ", and does not work just now"
    return Text(line)


def _counters(answer: admin_pb2.GetStatusResponse) -> dict[str, int]:
    return of_prefix(answer.counters, "peer_")


def hosts_table(answer: admin_pb2.GetStatusResponse) -> Table:
    """Return a row for each host."""
    table = new_table("host", "", ">blocks", ">fetches", ">received", ">GB/s", ">serves", "")
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
