"""The verbs of `kvtier policy` about one file, or about what a daemon runs with: validate, show, apply,
schema.

Exit codes: 0 fine, 1 the daemon refused it, or would for what is on this machine, 2 the file is wrong (one
line a problem, with file, line, key and fix), 3 no daemon answers.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import click
from click.core import ParameterSource
from rich.table import Table

from ...v1 import admin_pb2
from ..config import DEFAULT_SOURCE, Change, Problem, Settings, SettingsError, is_live, note_of_empty
from ..config.sources import read_policy
from ..preflight.verdicts import CheckVerdict
from . import EXIT_FAILED, EXIT_OK
from .output import console, print_json
from .settings_options import RefusedSettings, load_traced, settings_options
from .target import TIMEOUT_S, admin, json_option, resolve, target_option

APPLY_TIMEOUT_S = 60.0  # new segment files are written to, which takes a disk its time

Row = tuple[str, object, str]  # key, value, source


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--no-files", is_flag=True, help="Do not look at the files FILE names; they are elsewhere.")
@json_option
def validate(file: Path, no_files: bool, as_json: bool) -> None:
    """Check FILE without a daemon; print nothing when it is right.

    The checks are those that the daemon makes at its start: of the settings, and of certificates, tokens,
    keys and profiles that FILE names, as they are on this machine. Every problem is one line: file, line,
    key, what is wrong and what to write instead. What the environment says does not count here.

    Exit code 2 when FILE is wrong, 1 when a file that it names is, 0 with or without warnings.

    \b
    Example:
      kvtier policy validate /etc/kvtier/policy.yaml && kvtier policy apply /etc/kvtier/policy.yaml
      kvtier policy validate --no-files policy.yaml
    """
    from ..preflight.facts import Facts  # late: other verbs need none of it
    from ..preflight.table import Scope, examine

    try:
        written, settings = Settings.load_traced(file, {})
    except SettingsError as error:
        _tell(error.problems, [], as_json)
        raise SystemExit(RefusedSettings.exit_code) from error
    verdicts: dict[CheckVerdict, list[Problem]] = {verdict: [] for verdict in CheckVerdict}
    if written.empty_file:
        verdicts[CheckVerdict.WARN].append(note_of_empty(written.empty_file))
    facts, code = Facts(settings), EXIT_OK
    for scope in (Scope.SETTINGS,) if no_files else (Scope.SETTINGS, Scope.FILES):
        for check in examine(facts, settings, [scope]):
            source = written.source_of(tuple(check.setting.split(".")) if check.setting else ())
            verdicts[check.verdict].append(Problem(source, check.setting, check.advice))
            if check.verdict is CheckVerdict.FAIL and code != RefusedSettings.exit_code:
                code = RefusedSettings.exit_code if scope is Scope.SETTINGS else EXIT_FAILED
    _tell(verdicts[CheckVerdict.FAIL], verdicts[CheckVerdict.WARN], as_json)
    if code == EXIT_FAILED and not as_json:
        click.echo(
            "Files were looked for on this machine; --no-files where the daemon runs elsewhere.", err=True
        )
    raise SystemExit(code)


def _tell(problems: Sequence[Problem], warnings: Sequence[Problem], as_json: bool) -> None:
    """Print what validating found: problems and warnings to stderr, or both as JSON."""
    if as_json:
        plain = {"problems": [one._asdict() for one in problems], "warnings": [w._asdict() for w in warnings]}
        print_json({"valid": not problems, **plain})
        return
    for problem in problems:
        click.echo(f"Error: {problem}", err=True)
    for warning in warnings:
        click.echo(f"Warning: {warning}", err=True)


@click.command()
@click.argument("file", required=False, type=click.Path(path_type=Path))
@settings_options
@target_option
@click.option("--running", is_flag=True, help="Ask the daemon what is in force there.")
@click.option("--changed", "only_changed", is_flag=True, help="Leave out what is as built in.")
@json_option
def show(
    file: Path | None,
    policy: Path | None,
    overrides: Sequence[str],
    target: str | None,
    running: bool,
    only_changed: bool,
    as_json: bool,
) -> None:
    """Print every setting, its value, and where that was written.

    Sources are the command line, variables, a line of the file, and defaults, the strongest first. FILE is
    the same as --policy.

    \b
    Example:
      kvtier policy show policy.yaml --changed
      kvtier policy show --running
    """
    origin = click.get_current_context().get_parameter_source("policy")
    if file is not None and (running or origin is ParameterSource.COMMANDLINE):
        raise click.UsageError("name one: FILE, --policy FILE or --running")
    status: admin_pb2.PolicyStatus | None = None
    if running:
        with admin(resolve(target)) as stub:
            answer = stub.GetPolicy(admin_pb2.GetPolicyRequest(), timeout=TIMEOUT_S)
        rows: list[Row] = [(v.key, json.loads(v.json), v.source) for v in answer.values]
        status = answer.status
    else:
        rows = list(load_traced(file or policy, overrides).rows())
    rows = [row for row in rows if not only_changed or row[2] != DEFAULT_SOURCE]
    if as_json:
        values = {key: {"value": value, "source": source} for key, value, source in rows}
        print_json({"generation": status.generation if status else None, "settings": values})
        return
    if status is not None:
        _show_status(status)
    table = Table.grid(padding=(0, 2))
    for key, value, source in rows:
        table.add_row(key, _plain(value), source, style="dim" if source == DEFAULT_SOURCE else None)
    console().print(table)


@click.command()
@click.argument("file", required=False, type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--dry-run", is_flag=True, help="Let the daemon check and compare it, and change nothing.")
@click.option("--generation", type=int, default=0, help="Refuse unless this generation is in force.")
@target_option
@json_option
def apply(file: Path | None, dry_run: bool, generation: int, target: str | None, as_json: bool) -> None:
    """Bring FILE into force in a running daemon, as a whole or not at all; print what changes.

    Without FILE the daemon reads its own policy file again, which it also does by itself when the file
    changes. What is applied lasts until then: to keep it over a restart, write it into the daemon's file.

    \b
    Example:
      kvtier policy apply policy.yaml --dry-run
      kvtier policy apply policy.yaml
    """
    request = admin_pb2.ApplyPolicyRequest(dry_run=dry_run, generation=generation)
    if file is not None:
        try:
            request.yaml, request.name = read_policy(file), str(file)
        except (OSError, UnicodeDecodeError) as error:
            raise RefusedSettings(f"{file}: cannot be read: {error}") from error
    with admin(resolve(target)) as stub:
        answer = stub.ApplyPolicy(request, timeout=APPLY_TIMEOUT_S)
    found = [Change(c.key, json.loads(c.was), json.loads(c.becomes)) for c in answer.changes]
    if as_json:
        print_json({"generation": answer.generation, "dry_run": dry_run, "changes": by_key(found)})
        return
    show_changes(found, as_json=False)
    verb = "in force is still" if dry_run else "in force is"
    console().print(f"{verb} generation {answer.generation}")


@click.command()
def schema() -> None:
    """Print the JSON Schema of policy files, for editors.

    Put

    \b
      # yaml-language-server: $schema=policy.schema.json

    into the first line of a policy.

    \b
    Example:
      kvtier policy schema > policy.schema.json
    """
    from ..config import schema_text  # late: builds the whole schema

    click.echo(schema_text(), nl=False)


def show_changes(found: Iterable[Change], as_json: bool) -> None:
    """Print what would be another, and which of it a running daemon cannot change."""
    found = list(found)
    if as_json:
        return print_json({"changes": by_key(found)})
    screen = console()
    for one in found:
        note = "" if one.is_live else "   (needs a restart)"
        screen.print(f"  {one.key}: {_plain(one.was)} → {_plain(one.becomes)}{note}", markup=False)
    if not found:
        screen.print("no setting differs")
    return None


def by_key(found: Iterable[Change]) -> dict[str, dict[str, object]]:
    """Return changes as plain values."""
    return {
        one.key: {"was": one.was, "becomes": one.becomes, "needs_restart": not is_live(one.key)}
        for one in found
    }


def _show_status(status: admin_pb2.PolicyStatus) -> None:
    screen = console()
    screen.print(f"generation {status.generation}, from {status.path or 'no file'}", markup=False)
    if status.last_error:
        screen.print(f"the policy file has been refused for {status.refused_s_ago:.0f} s:", style="bold red")
        screen.print(f"  {status.last_error}", markup=False)


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)
