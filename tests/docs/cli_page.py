"""docs/cli.md and commands.json: every command, as its --help has it and as completion needs it."""

import json
import re
from collections.abc import Iterator
from typing import Any

import click

from kvtier.appliance.cli.app import cli

_ATTRIBUTES = {"flag": "is_flag", "many": "multiple"}
_INTRO = """# Commands

Generated from `appliance/cli` by `make docs`. `KVTIER_TARGET` stands for `--target`. Completion:
`eval "$(_KVTIER_COMPLETE=bash_source kvtier)"`, or `zsh_source`, `fish_source`.
"""


def commands() -> Iterator[tuple[str, str]]:
    """Yield (name, help) of the program and every command below it."""
    yield from _below("kvtier", cli, None)


def _below(name: str, command: click.Command, parent: click.Context | None) -> Iterator[tuple[str, str]]:
    settings = {"terminal_width": 100, **cli.context_settings}
    with click.Context(command, info_name=name, parent=parent, **settings) as context:
        yield context.command_path, command.get_help(context)
        if isinstance(command, click.Group):
            for child in sorted(command.list_commands(context)):
                below = command.get_command(context, child)
                assert below is not None
                yield from _below(child, below, context)


def completion_json() -> str:
    """Return commands.json, which completion reads: one parameter a line."""
    text = json.dumps(describe(cli), indent=1, ensure_ascii=False)
    return re.sub(r"\{\s*\"names\"[^{}]*\}", _on_one_line, text) + "\n"


def _on_one_line(found: re.Match[str]) -> str:
    return json.dumps(json.loads(found[0]), ensure_ascii=False)


def cli_markdown() -> str:
    """Return the page."""
    parts = [f"\n## {path}\n\n```\n{text}\n```\n" for path, text in commands()]
    return _INTRO + "".join(parts)


def describe(command: click.Command) -> dict[str, Any]:
    """Return what completion needs to know of a command and those below it, as plain values."""
    described: dict[str, Any] = {
        "help": command.get_short_help_str(),
        "params": [_describe(param) for param in command.params if not getattr(param, "hidden", False)],
    }
    if isinstance(command, click.Group):
        with click.Context(command) as context:
            found = {name: command.get_command(context, name) for name in command.list_commands(context)}
        described["commands"] = {name: describe(one) for name, one in sorted(found.items()) if one}
    return described


def _describe(param: click.Parameter) -> dict[str, Any]:
    described: dict[str, Any] = {"names": [*param.opts, *param.secondary_opts]}
    if param.nargs != 1:
        described["nargs"] = param.nargs
    if isinstance(param.type, click.Choice):
        described["choices"] = list(param.type.choices)
    elif isinstance(param.type, click.Path):
        described["path"] = "file" if param.type.file_okay else "dir"
    if isinstance(param, click.Option):
        described |= {name: True for name in ("flag", "many") if getattr(param, _ATTRIBUTES[name])}
        described["help"] = param.help or ""
    return described
