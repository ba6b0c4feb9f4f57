"""--policy and --set: how commands that stand beside the daemon, not before it, read its settings."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from ..config import Loaded, Origin, Settings, SettingsError, note_of_empty
from . import EXIT_USAGE

Command = TypeVar("Command", bound=Callable[..., Any])


class RefusedSettings(click.ClickException):
    """The settings are refused; one line on stderr per problem."""

    exit_code = EXIT_USAGE


def settings_options(command: Command) -> Command:
    """Give `command` the options --policy and --set."""
    command = click.option(
        "--set",
        "overrides",
        multiple=True,
        metavar="KEY.KEY=VALUE",
        help="Overrides one setting, e.g. --set tiers.dram.capacity=1GiB. May be repeated.",
    )(command)
    return click.option(
        "--policy",
        type=click.Path(path_type=Path, dir_okay=False),
        envvar="KVTIER_POLICY",
        help="Settings, in YAML.  [default: $KVTIER_POLICY, else built-in defaults]",
    )(command)


def load(policy: Path | None, overrides: Sequence[str]) -> Settings:
    """Return the settings. Raises Refused."""
    return load_traced(policy, overrides).settings


def load_traced(policy: Path | None, overrides: Sequence[str]) -> Loaded:
    """Return the settings, and where each of them was written. Raises Refused."""
    try:
        loaded = Origin(policy, dict(os.environ), tuple(overrides)).load()
    except SettingsError as error:
        raise RefusedSettings(str(error)) from error
    if loaded.gathered.empty_file:
        click.echo(f"Warning: {note_of_empty(loaded.gathered.empty_file)}", err=True)
    return loaded
