"""The command line. `main` is the program `kvtier`; one module per command, nothing shared but words.

    app.py      the group and its options            target.py       one admin call, and its exit code
    output.py   text for people, JSON for programs   completion.py   what a shell completes

click and rich are an extra, because a daemon in a container needs neither; this module is what says so
when they are missing, hence it imports them late.
"""

import os
import sys

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2  # wrong arguments, or settings that are refused
EXIT_UNREACHABLE = 3
EXIT_DENIED = 4  # a daemon's socket is there, and this user may not open it: starting another one is no help

COMPLETE = "_KVTIER_COMPLETE"  # what click sets when a shell asks
_EXTRA = {"click": "cli", "rich": "cli", "pydantic": "server", "yaml": "server"}


def main() -> None:
    """Run the command line and exit: 0 ok, 1 failed, 2 usage or refused settings, 3 unreachable, 4 denied."""
    try:
        if COMPLETE in os.environ:
            from .completion import program

            program().main(prog_name="kvtier")
        from .app import cli

        cli.main(prog_name="kvtier")
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _EXTRA:
            raise
        print(
            f"kvtier: the command line needs {package}; install it with\n\n"
            "    pip install 'kvtier[server,cli]'\n",
            file=sys.stderr,
        )
        sys.exit(EXIT_FAILED)
