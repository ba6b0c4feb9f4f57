"""docs/cli.md and commands.json: every command, as its --help has it and as completion needs it."""

import json
from collections.abc import Iterator

import click

from kvtier.appliance.cli.app import cli
from kvtier.appliance.cli.completion import describe

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
    """Return commands.json, which completion reads."""
    return json.dumps(describe(cli), indent=1, ensure_ascii=False) + "\n"


def cli_markdown() -> str:
    """Return the page."""
    parts = [f"\n## {path}\n\n```\n{text}\n```\n" for path, text in commands()]
    return _INTRO + "".join(parts)
