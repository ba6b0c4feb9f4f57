"""`kvtier policy`: questions about policies, answered before anything is changed."""

from collections.abc import Sequence
from pathlib import Path

import click

from ..replay import report
from ..replay.setups import Setup, Shape, tiers_of
from ..settings import Settings, SettingsError
from .output import console, print_json
from .replay import read, run, speeds_of, trace_options
from .settings_options import Refused
from .target import Failed, json_option

DEFAULT = "default"


@click.group()
def policy() -> None:
    """Try a policy before it is in force.

    \b
    Example:
      kvtier policy diff --replay monday.jsonl.gz default policy.yaml
    """


@policy.command()
@click.argument("old")
@click.argument("new")
@click.option(
    "--replay",
    "trace_path",
    required=True,
    metavar="TRACE",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="A trace as for `kvtier replay`, e.g. what `kvtier record` wrote last week.",
)
@trace_options
@json_option
def diff(
    old: str,
    new: str,
    trace_path: Path,
    first: int | None,
    block_tokens: int,
    model: str,
    layers_per_group: int,
    edges: Sequence[str],
    edges_from: Path | None,
    jobs: int | None,
    as_json: bool,
) -> None:
    """Replay TRACE under two settings files and print what the change would have done.

    OLD and NEW are settings files, tiers and limits included; `default` is the built-in settings.

    \b
    Example:
      kvtier policy diff --replay monday.jsonl.gz default policy.yaml
      kvtier policy diff --replay monday.jsonl.gz policy.yaml policy-with-nvme.yaml --json
    """
    before, after = _load(old), _load(new)
    changes = changed_keys(before.canonical(), after.canonical())
    try:
        shape = Shape.parse(model, layers_per_group)
        speeds = speeds_of(edges, edges_from)
        trace = read(trace_path, block_tokens, first, quiet=as_json)
        setups: list[Setup] = [
            tiers_of(name, settings, trace, shape)
            for name, settings in zip(_labels(old, new), (before, after), strict=True)
        ]
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    outcomes = run(trace, setups, jobs, speeds)
    if as_json:
        print_json({"changes": changes, **report.plain(trace, outcomes)})
    else:
        screen = console()
        screen.print(report.about(trace))
        for key, (was, becomes) in changes.items():
            screen.print(f"  {key}: {was} → {becomes}", markup=False)
        screen.print(report.differences(*outcomes))
    if any(outcome.problems for outcome in outcomes):
        raise Failed("the audit after the replay found problems; that is a defect, please report it")


def changed_keys(old: object, new: object, key: str = "") -> dict[str, tuple[object, object]]:
    """Return (old, new) of every setting that differs, by its dotted key."""
    if isinstance(old, dict) and isinstance(new, dict):
        changes: dict[str, tuple[object, object]] = {}
        for name in dict.fromkeys([*old, *new]):
            below = f"{key}.{name}" if key else str(name)
            changes |= changed_keys(old.get(name), new.get(name), below)
        return changes
    return {} if old == new else {key: (old, new)}


def _labels(old: str, new: str) -> tuple[str, str]:
    """Return short names for two files that tell them apart."""
    names = (Path(old).name, Path(new).name)
    return names if names[0] != names[1] else (f"old: {old}", f"new: {new}")


def _load(name: str) -> Settings:
    """Return the settings of a file, or the built-in ones. What the environment says does not count."""
    try:
        return Settings.load(None if name == DEFAULT else Path(name), {})
    except SettingsError as error:
        raise Refused(str(error)) from error
