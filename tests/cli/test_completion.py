"""What every TAB and every `--version` imports, and what completion offers."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest

import kvtier.appliance.cli
from kvtier.appliance.cli.app import COMMANDS, cli
from kvtier.appliance.cli.completion import program

#: Runs the program as its script does; the last line of stderr is all that was imported for it.
PROGRAM = """
import atexit, json, sys
atexit.register(lambda: print(json.dumps(sorted(sys.modules)), file=sys.stderr))
from kvtier.appliance.cli import main
main()
"""
OURS = {"kvtier", "kvtier.lazy", "kvtier.appliance", "kvtier.appliance.cli"}
SLOW = {"asyncio", "multiprocessing", "ssl", "http", "email", "xml", "sqlite3", "concurrent.futures"}


def imported(*arguments: str, words: str | None = None) -> tuple[str, set[str]]:
    """Run the program; return what it printed, and the names of all modules it imported."""
    env = dict(os.environ)
    if words is not None:
        env |= {"_KVTIER_COMPLETE": "bash_complete", "COMP_WORDS": words}
        env["COMP_CWORD"] = str(len(words.split(" ")) - 1)
    command = [sys.executable, "-c", PROGRAM, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, env=env, check=True)
    return result.stdout, set(json.loads(result.stderr.splitlines()[-1]))


def third_parties(modules: set[str]) -> set[str]:
    """Return the packages among the modules that are not Python's, nor imported by every process here."""
    probe = [sys.executable, "-c", "import sys, json; print(json.dumps(sorted(sys.modules)))"]
    at_start = set(json.loads(subprocess.run(probe, capture_output=True, text=True, check=True).stdout))
    packages = {name.partition(".")[0] for name in modules - at_start}
    return {name for name in packages if name not in sys.stdlib_module_names and name != "__main__"}


def test_the_version_is_said_without_importing_a_command() -> None:
    text, modules = imported("--version")
    assert text.startswith("kvtier, version ")
    assert third_parties(modules) == {"kvtier", "click"}
    assert {name for name in modules if name.startswith("kvtier")} == OURS | {"kvtier.appliance.cli.app"}
    assert modules & SLOW == set()


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("kvtier st", ["status", "story"]),
        ("kvtier evict ", ["hbm", "dram", "nvme"]),
        ("kvtier calibrate --coder tr", ["transform"]),
        ("kvtier status --", ["--wait", "--target", "--json", "--help"]),
        ("kvtier policy s", ["schema", "show"]),
    ],
)
def test_a_shell_completes_without_importing_a_command(words: str, offered: list[str]) -> None:
    text, modules = imported(words=words)
    assert text.splitlines() == [f"plain,{word}" for word in offered]
    assert third_parties(modules) == {"kvtier", "click"}
    ours = {name for name in modules if name.startswith("kvtier")}
    assert ours == OURS | {"kvtier.appliance.cli.completion"}
    assert modules & SLOW == set()


def test_files_are_completed_where_a_file_is_wanted() -> None:
    assert imported(words="kvtier replay ")[0] == "file,\n"
    assert imported(words="kvtier record --out ")[0] == "file,\n"
    assert imported(words="kvtier inspect segment --data ")[0] == "dir,\n"


def test_every_module_of_a_command_is_a_command() -> None:
    """A command that is forgotten in the list cannot be called."""
    folder = Path(kvtier.appliance.cli.__file__).parent
    with click.Context(cli) as context:
        for name in COMMANDS:
            command = cli.get_command(context, name)
            assert command is not None
            assert command.name == name
        texts = {path.stem: path.read_text() for path in folder.glob("*.py")}
        made = {
            name
            for name, text in texts.items()
            if re.search(r"^@click\.(command|group)\(", text, re.M) and f"\ndef {name}(" in text
        }
        assert made == set(COMMANDS)
        assert cli.get_command(context, "dance") is None


def test_what_is_completed_cannot_be_called_otherwise() -> None:
    """The names of all commands and options are those of the commands themselves."""

    def names(command: click.Command) -> object:
        own = {option for param in command.params for option in (*param.opts, *param.secondary_opts)}
        if not isinstance(command, click.Group):
            return own
        with click.Context(command) as context:
            below = {name: command.get_command(context, name) for name in command.list_commands(context)}
            return own, {name: names(one) for name, one in below.items() if one is not None}

    assert names(program()) == names(cli)
