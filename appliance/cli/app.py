"""The group of all commands. A command's module is imported when the command is called, and no other."""

from importlib import import_module

import click

from ... import __version__

COMMANDS = (
    "bench",
    "calibrate",
    "doctor",
    "drain",
    "evict",
    "fleet",
    "inspect",
    "objects",
    "policy",
    "record",
    "replay",
    "restart",
    "serve",
    "status",
    "story",
    "tenant",
    "top",
    "verify",
    "why",
)


class Commands(click.Group):
    """Finds a command in the module of its name."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command; None when there is none of that name."""
        if cmd_name not in COMMANDS:
            return None
        command = getattr(import_module(f".{cmd_name}", __package__), cmd_name)
        assert isinstance(command, click.Command)
        return command


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="kvtier")
def cli() -> None:
    """Keep the KV cache of language models in tiers, and know what is kept.

    Data goes to stdout, messages to stderr.

    \b
    Exit codes:
      0   success
      1   failed
      2   wrong arguments, or settings that are refused
      3   no daemon reachable
      4   no permission to open the daemon's socket
      70  serve: internal error; the log has the trace
      78  serve: cannot start; the message names the setting to change

    \b
    Example:
      kvtier serve --policy policy.yaml &
      kvtier doctor
      kvtier status
    """
