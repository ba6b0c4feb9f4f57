"""`kvtier drain`: let a daemon finish, flush and go."""

import click

from ...v1 import admin_pb2
from .output import console, plain, print_json
from .quantities import duration
from .target import admin, json_option, resolve, target_option


@click.command()
@click.option(
    "--grace",
    "grace_s",
    default="30s",
    show_default=True,
    type=duration(),
    help="How long work in progress may go on.",
)
@click.option("--exit", "exit_", is_flag=True, help="End the daemon when it is drained.")
@target_option
@json_option
def drain(grace_s: float, exit_: bool, target: str | None, as_json: bool) -> None:
    """Refuse new work, end leases, flush what only memory holds, seal the cold store.

    \b
    Example:
      kvtier drain --grace 30s --exit
    """
    request = admin_pb2.DrainRequest(exit=exit_, grace_ms=round(grace_s * 1000))
    with admin(resolve(target)) as stub:
        answer = stub.Drain(request, timeout=2 * grace_s + 60)
    if as_json:
        print_json(plain(answer))
        return
    said = f"drained: {answer.num_leases_ended:,} leases ended, {answer.num_blocks_flushed:,} blocks flushed"
    if num_unflushed := answer.num_blocks_unflushed:
        said += f", {num_unflushed:,} only in memory {'are' if exit_ else 'will be'} lost"
    console().print(
        said + (", the daemon exits" if exit_ else "; it takes nothing new: end it with SIGTERM, or --exit")
    )
