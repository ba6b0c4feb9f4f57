"""`python -m tests.crash.overlay --iterations 100`: the store loop on an overlay file system.

A container without a volume writes there. The folder is mounted in a mount namespace of its own, which ends
with the loop. Needs root, or user namespaces.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

MOUNT = 'mount -t overlay overlay -o "lowerdir=$1/l,upperdir=$1/u,workdir=$1/w" "$1/m"'
IS_OVERLAY = 'test "$(stat -f -c %T "$1/m")" = overlayfs'


def run_on_overlay(folder: Path, command: list[str]) -> "subprocess.CompletedProcess[str]":
    """Run a command with TMPDIR on an overlay file system of which all layers are in `folder`.
    The status is 32, what mount(8) ends with, where none can be mounted."""
    for layer in "luwm":
        (folder / layer).mkdir()
    script = f'{MOUNT} || exit 32; {IS_OVERLAY} || exit 32; export TMPDIR="$1/m"; shift; exec "$@"'
    namespaces = ["unshare", "--mount", *(["--map-root-user"] if os.getuid() else [])]
    return subprocess.run(
        [*namespaces, "sh", "-c", script, "sh", str(folder), *command], capture_output=True, text=True
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.crash.overlay", description=__doc__)
    parser.add_argument("--iterations", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    loop = [sys.executable, "-m", "tests.crash.store_loop"]
    loop += ["--iterations", str(arguments.iterations), "--seed", str(arguments.seed)]
    with tempfile.TemporaryDirectory(prefix="kvtier-overlay-") as name:
        done = run_on_overlay(Path(name), loop)
    print(done.stdout, end="")
    print(done.stderr, end="", file=sys.stderr)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
