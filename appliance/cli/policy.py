"""`kvtier policy`: look at policies, compare them, and bring one into force in a running daemon."""

from collections.abc import Sequence
from pathlib import Path

import click

from ..config import Settings, SettingsError, changes
from ..replay import report
from ..replay.setups import ModelShape, Setup, tiers_of
from .output import console, print_json
from .policy_file import apply, by_key, schema, show, show_changes, validate
from .replay import read, run, speeds_of, trace_options
from .settings_options import RefusedSettings
from .target import Failed, json_option

DEFAULT = "default"


@click.group()
def policy() -> None:
    """Check a policy, try it, bring it into force without a restart.

    \b
    Example:
      kvtier policy validate policy.yaml
      kvtier policy diff --replay monday.jsonl.gz default policy.yaml
      kvtier policy apply policy.yaml --dry-run
    """


for command in (validate, show, apply, schema):
    policy.add_command(command)


@policy.command()
@click.argument("old")
@click.argument("new")
@click.option(
    "--replay",
    "trace_path",
    metavar="TRACE",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Replay this trace under both, too: a trace as for `kvtier replay`, e.g. one of `kvtier record`.",
)
@trace_options
@json_option
def diff(
    old: str,
    new: str,
    trace_path: Path | None,
    first: int | None,
    block_tokens: int,
    content_ids: bool,
    model: str,
    layers_per_group: int,
    prefill_speed: float,
    edges: Sequence[str],
    edges_from: Path | None,
    jobs: int | None,
    as_json: bool,
) -> None:
    """Print what differs between two settings files, and what of it needs a restart.

    With a trace, also what the change would have done to it. OLD and NEW are settings files, tiers and limits
    included; `default` is the built-in settings.

    \b
    Example:
      kvtier policy diff default policy.yaml
      kvtier policy diff --replay monday.jsonl.gz default policy.yaml
      kvtier policy diff --replay monday.jsonl.gz policy.yaml policy-with-nvme.yaml --json
    """
    before, after = _load(old), _load(new)
    found = changes(before, after)
    if trace_path is None or not as_json:
        show_changes(found, as_json)
    if trace_path is None:
        return
    try:
        shape = ModelShape.parse(model, layers_per_group, prefill_speed)
        speeds = speeds_of(edges, edges_from)
        trace = read(trace_path, block_tokens, content_ids, first)
        setups: list[Setup] = [
            tiers_of(name, settings, trace, shape)
            for name, settings in zip(_labels(old, new), (before, after), strict=True)
        ]
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    outcomes = run(trace, setups, jobs, speeds)
    if as_json:
        print_json({"changes": by_key(found), **report.plain(trace, outcomes)})
    else:
        screen = console()
        screen.print(report.about(trace))
        screen.print(report.differences(*outcomes))
    if any(outcome.problems for outcome in outcomes):
        raise Failed("the audit after the replay found problems; that is a defect, please report it")


def _labels(old: str, new: str) -> tuple[str, str]:
    """Return short names for two files that tell them apart."""
    names = (Path(old).name, Path(new).name)
    return names if names[0] != names[1] else (f"old: {old}", f"new: {new}")


def _load(name: str) -> Settings:
    """Return the settings of a file, or the built-in ones. What the environment says does not count."""
    try:
        return Settings.load(None if name == DEFAULT else Path(name), {})
    except SettingsError as error:
        raise RefusedSettings(str(error)) from error
