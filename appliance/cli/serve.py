"""`kvtier serve`: run the daemon in the foreground, as service managers and containers want it."""

import os
from collections.abc import Sequence
from pathlib import Path

import click

from ...tiers.memory.keeper import Keeper
from ..preflight import HELD_BYTES
from . import supervise
from .settings_options import RefusedSettings, load_traced, settings_options


@click.command()
@settings_options
@click.option(
    "--listen",
    multiple=True,
    metavar="ADDRESS",
    help="Address to serve, unix:///path or host:port. May be repeated; replaces those of the policy.",
)
@click.option("--check", is_flag=True, help="Check the settings, print them with all defaults, and end.")
@click.pass_obj
def serve(
    keeper: Keeper | None, policy: Path | None, overrides: Sequence[str], listen: Sequence[str], check: bool
) -> None:
    """Run the daemon until SIGTERM or SIGINT, which drain it; a second one ends it at once.

    The policy file is read again when it changes, and at SIGHUP; see `kvtier policy --help`.

    \b
    Example:
      kvtier serve
      kvtier serve --policy /etc/kvtier/policy.yaml --set tiers.dram.capacity=64GiB
      kvtier serve --listen 127.0.0.1:50051 --set access.insecure=true
      kvtier serve --policy policy.yaml --check
    """
    if keeper is None and not check:
        supervise()
    if listen:
        quoted = ", ".join(f"'{address}'" for address in listen)
        overrides = [*overrides, f"listen=[{quoted}]"]
    loaded = load_traced(policy, overrides)
    if check:
        if held := os.environ.get(HELD_BYTES):  # asked by a daemon that would make room
            from ..preflight.table import objections, sentence

            if wrong := objections(loaded.settings, *map(int, held.split())):
                raise RefusedSettings(sentence(wrong))
        click.echo(loaded.settings.to_yaml(), nl=False)
        return
    assert keeper is not None
    from ..host.process import run  # late: `--help` and `--check` need no server code

    raise SystemExit(run(loaded, keeper))
