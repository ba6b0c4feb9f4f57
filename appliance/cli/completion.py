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
    names, nargs = described["names"], described.get("nargs", 1)
    if "help" not in described:
        return click.Argument(names, type=kind, nargs=nargs, required=False)
    if "flag" in described:
        return click.Option(names, is_flag=True, help=described["help"])
    return click.Option(names, type=kind, nargs=nargs, multiple="many" in described, help=described["help"])
