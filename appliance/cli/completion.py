"""What a shell completes: the commands, options and choices of commands.json, without their modules.

Every TAB runs the program. The modules of commands import what they need to work (gRPC, numpy, pydantic), a
second of it; so completion answers from a file that `make docs` writes from the commands themselves.
"""

import json
from pathlib import Path
from typing import Any

import click

FILE = Path(__file__).with_name("commands.json")
Described = dict[str, Any]


def describe(command: click.Command) -> Described:
    """Return what completion needs to know of a command and those below it, as plain values."""
    described: Described = {
        "help": command.get_short_help_str(),
        "params": [_describe(param) for param in command.params if not getattr(param, "hidden", False)],
    }
    if isinstance(command, click.Group):
        with click.Context(command) as context:
            found = {name: command.get_command(context, name) for name in command.list_commands(context)}
        described["commands"] = {name: describe(one) for name, one in sorted(found.items()) if one}
    return described


def _describe(param: click.Parameter) -> Described:
    described: Described = {"names": [*param.opts, *param.secondary_opts], "nargs": param.nargs}
    if isinstance(param.type, click.Choice):
        described["choices"] = list(param.type.choices)
    elif isinstance(param.type, click.Path):
        described["path"] = "file" if param.type.file_okay else "dir"
    if isinstance(param, click.Option):
        described |= {"flag": param.is_flag, "many": param.multiple, "help": param.help or ""}
    return described


def program() -> click.Group:
    """Return the commands as click completes them. They cannot be run."""
    made = _command("kvtier", json.loads(FILE.read_text("utf-8")))
    assert isinstance(made, click.Group)
    return made


def _command(name: str, described: Described) -> click.Command:
    params = [_param(one) for one in described["params"]]
    settings = {"help_option_names": ["-h", "--help"]}
    if "commands" not in described:
        return click.Command(name, settings, params=params, short_help=described["help"])
    commands = {word: _command(word, one) for word, one in described["commands"].items()}
    return click.Group(name, commands, context_settings=settings, params=params, short_help=described["help"])


def _param(described: Described) -> click.Parameter:
    kind: Any = click.STRING
    if "choices" in described:
        kind = click.Choice(described["choices"])
    elif "path" in described:
        is_file = described["path"] == "file"
        kind = click.Path(file_okay=is_file, dir_okay=not is_file)
    if "flag" not in described:
        return click.Argument(described["names"], type=kind, nargs=described["nargs"], required=False)
    if described["flag"]:
        return click.Option(described["names"], is_flag=True, help=described["help"])
    return click.Option(
        described["names"],
        type=kind,
        nargs=described["nargs"],
        multiple=described["many"],
        help=described["help"],
    )
