"""The command line. `main` is the program `kvtier`; one module per command, nothing shared but words.

    app.py      the group and its options            target.py       one admin call, and its exit code
    output.py   text for people, JSON for programs   completion.py   what a shell completes

click and rich are an extra, because a daemon in a container needs neither; this module is what says so
when they are missing, hence it imports them late.
"""

import errno
import io
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from ...tiers.memory.keeper import Keeper

# `kvtier --help` explains them (app.py); those of the daemon itself, 70 and 78, are in ..process.
EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2  # wrong arguments, or settings that are refused
EXIT_UNREACHABLE = 3
EXIT_DENIED = 4  # a daemon's socket is there, and this user may not open it: starting another one is no help

COMPLETE = "_KVTIER_COMPLETE"  # what click sets when a shell asks
_EXTRA = {"click": "cli", "rich": "cli", "pydantic": "server", "yaml": "server"}
_SUPERVISOR = Path(__file__).parents[1] / "supervisor.py"  # run by its path: it imports nothing of ours
_ONLY_ANSWERED = {"--check", "--help", "-h"}  # of serve: what starts no daemon

#: What writing fails with when a disk, a quota or a device is at its end.
_CANNOT_WRITE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}


def main(keeper: "Keeper | None" = None) -> None:
    """Run the command line and exit with a code that `kvtier --help` lists.

    `keeper` is what a supervisor gives the process that it started for `serve`.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that knows ASCII only shows ? for the rest
    try:
        try:
            _run(keeper)
        finally:
            sys.stdout.flush()  # what fails here can still be reported
    except OSError as error:
        if error.errno not in _CANNOT_WRITE:
            raise
        print(f"Error: the output cannot be written: {error.strerror}", file=sys.stderr)
        # Python flushes stdout once more when it ends, and would complain again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(EXIT_FAILED)


def supervise() -> NoReturn:
    """Become the supervisor, which starts `kvtier serve` with these arguments and a keeper."""
    # -P: its folder is no place to look for modules.
    os.execv(sys.executable, [sys.executable, "-P", str(_SUPERVISOR), *sys.argv[1:]])


def _run(keeper: "Keeper | None") -> None:
    """Run completion or a command, which end in SystemExit. Names the extra to install when it is missing."""
    try:
        if COMPLETE in os.environ:
            from .completion import program

            program().main(prog_name="kvtier")
        if keeper is None and sys.argv[1:2] == ["serve"] and _ONLY_ANSWERED.isdisjoint(sys.argv):
            supervise()  # before the rest is imported: the daemon does that, and it takes 0.3 s
        from .app import cli

        cli.main(prog_name="kvtier", obj=keeper)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _EXTRA:
            raise
        print(
            f"Error: the command line needs {package}; install it with\n\n"
            "    pip install 'kvtier[server,cli]'\n",
            file=sys.stderr,
        )
        sys.exit(EXIT_FAILED)
