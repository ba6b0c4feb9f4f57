"""`kvtier restart`: another daemon in place of the running one, with what memory holds."""

import click

from ...v1 import admin_pb2
from .output import console
from .quantities import duration
from .status import ask
from .target import admin, resolve, target_option


@click.command()
@click.option(
    "--wait",
    "wait_s",
    default="60s",
    show_default=True,
    type=duration(),
    help="How long the new daemon may take to answer.",
)
@target_option
def restart(wait_s: float, target: str | None) -> None:
    """Replace the daemon, after an upgrade for example; what memory holds stays.

    Work in progress ends, clients connect again. Nothing is served from memory before it was verified.

    \b
    Example:
      kvtier restart
    """
    with admin(resolve(target)) as stub:
        before = stub.GetStatus(admin_pb2.GetStatusRequest(), timeout=wait_s).epoch
        stub.Drain(admin_pb2.DrainRequest(restart=True, grace_ms=5000), timeout=wait_s)
    _, answer = ask(target, wait_s, before)
    console().print(f"kvtier {answer.version} has taken over")
