"""`kvtier why`: which blocks left which tier and when, and the block that was next, with both prices."""

from collections.abc import Sequence

import click
from rich.table import Table

from ...v1 import admin_pb2
from ..config.units import about_duration
from .names import name_subject
from .output import console, new_table, plain, print_json
from .target import TIMEOUT_S, admin, json_option, resolve, target_option

SHORT_BYTES = 4  # of a hash: what the commands take, too


@click.command()
@click.argument("kind", type=click.Choice(["block", "session"]))
@click.argument("name")
@target_option
@json_option
def why(kind: str, name: str, target: str | None, as_json: bool) -> None:
    """Say why a block, or the blocks of a session, are where they are.

    NAME is a session's id, or NAMESPACE:HASH for a block, with the first 8 hex digits of its prefix
    hash or more. Answers from the decision log: which blocks left which tier, how long ago, why, at
    which price, and which block would have been next at which price. The smallest price is evicted first.

    \b
    Example:
      kvtier why session agent-42
      kvtier why block 1:5f3a9c01 --json
    """
    request = admin_pb2.ExplainRequest()
    name_subject(request, kind, name)
    with admin(resolve(target)) as stub:
        answer = stub.Explain(request, timeout=TIMEOUT_S)
        ladder = stub.GetStatus(admin_pb2.GetStatusRequest(), timeout=TIMEOUT_S).ladder
    if as_json:
        print_json(_plain(answer))
        return
    screen = console()
    screen.print(headline(kind, name, answer, [tier.name for tier in ladder]), markup=False, soft_wrap=True)
    if answer.exits:
        screen.print(_table(answer))


def headline(kind: str, name: str, answer: admin_pb2.ExplainResponse, tiers: Sequence[str]) -> str:
    """Return where the blocks are, in a sentence. `tiers`: names, fastest first."""
    places = {**{tier: f"in {tier}" for tier in tiers}, "store": "only in the object store", "gone": "gone"}
    where = [(place, answer.num_blocks[place]) for place in places if place in answer.num_blocks]
    if kind == "block":
        found = where[0][0]
        place = "is in no tier any more" if found == "gone" else f"is {places[found]}"
        left = "" if answer.exits else "; nothing is remembered of it leaving a tier"
        return f"block {answer.prefix_hash[:SHORT_BYTES].hex()} {place}{left}"
    total = sum(count for _, count in where)
    parts = ", ".join(f"{count:,} {places[place]}" for place, count in where)
    return f"session {name}: of the {total:,} blocks of its last chain, {parts}"


def _plain(answer: admin_pb2.ExplainResponse) -> dict[str, object]:
    """Return the answer for programs; what was not priced is null, not 0."""
    values = plain(answer)
    for exit_, entry in zip(answer.exits, values["exits"], strict=True):
        for price in ("price", "next_price"):
            if not exit_.HasField(price):
                entry[price] = None
    return values


def _table(answer: admin_pb2.ExplainResponse) -> Table:
    table = new_table(">ago", ">blocks", "left", "because", ">price", "chosen over")
    for exit_ in answer.exits:
        table.add_row(
            about_duration(max(0.0, answer.uptime_s - exit_.at_s)),
            f"{exit_.num_blocks:,}",
            exit_.tier,
            exit_.why.replace("[", r"\["),
            f"{exit_.price:.4g}" if exit_.HasField("price") else "–",
            _over(exit_),
        )
    return table


def _over(exit_: admin_pb2.Exit) -> str:
    """Return the runner-up and its price."""
    if not exit_.HasField("price"):
        return "–"
    if not exit_.HasField("next_price"):
        return "no other block could leave"
    return f"{exit_.next_hash[:SHORT_BYTES].hex() or 'another'} at {exit_.next_price:.4g}"
