"""`python -m bench.peers install [mooncake] [lmcache] [--peers DIR]`: the peers' own virtual environments.

A peer pins versions of numpy, protobuf and torch that are none of ours, so each lives in an environment of
its own and is driven through a pipe (`bench/worker.py`); nothing here is ever imported into kvtier's process.
Installing them with kvtier in one environment was rejected: LMCache alone wants numpy<=2.2.6 and a protobuf
older than ours.

LMCache is installed without its dependencies: its metadata demands CUDA packages, which do not install on a
machine without a GPU toolchain. requirements-lmcache.txt lists what its CPU path imports.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.machine import ROOT

DEFAULT_DIR = ROOT / ".cache" / "peers"


@dataclass(frozen=True, slots=True)
class PeerRecipe:
    """How one peer is installed: `wheel` is its distribution, `arguments` are those of `pip install`.

    `debian` are the packages with the system libraries that the peer's programs are linked against.
    """

    name: str
    wheel: str
    arguments: tuple[str, ...] = ()
    debian: tuple[str, ...] = ()

    @property
    def requirements(self) -> Path:
        """The pinned list that `make test-NAME` installs, too."""
        return ROOT / f"requirements-{self.name}.txt"

    @property
    def version(self) -> str:
        """The version of the peer in that list."""
        pin = f"{self.wheel}=="
        lines = self.requirements.read_text().splitlines()
        return next(line.removeprefix(pin) for line in lines if line.startswith(pin))


RECIPES = {
    recipe.name: recipe
    for recipe in (
        PeerRecipe(
            "mooncake",
            "mooncake-transfer-engine-non-cuda",
            ("numpy",),
            ("libibverbs1", "librdmacm1", "libnuma1", "libcurl4"),
        ),
        PeerRecipe("lmcache", "lmcache", ("--no-deps", "setuptools<81")),
    )
}


def python_of(directory: Path, name: str) -> Path:
    """Return the interpreter of peer `name`'s environment below `directory`; it may not exist."""
    return directory / name / "bin" / "python"


def is_installed(directory: Path, name: str) -> bool:
    """Return whether `install` has finished for this recipe's version."""
    stamp = directory / name / "kvtier-recipe"
    has_interpreter = python_of(directory, name).exists()  # its link breaks when the system's Python changes
    return has_interpreter and stamp.exists() and stamp.read_text() == RECIPES[name].version


def install(directory: Path, name: str) -> None:
    """Create the environment and run the recipe, unless complete. Raises CalledProcessError."""
    if is_installed(directory, name):
        return
    venv.create(directory / name, with_pip=True, clear=True)
    recipe = RECIPES[name]
    words = [*recipe.arguments, "--requirement", str(recipe.requirements)]
    print(f"{name}: pip install {' '.join(words)}", flush=True)
    command = [str(python_of(directory, name)), "-m", "pip", "install", "--quiet", *words]
    subprocess.run([*command, "--disable-pip-version-check"], check=True)
    (directory / name / "kvtier-recipe").write_text(recipe.version)


def install_line(names: list[str], directory: Path) -> str:
    """Return the command that installs the missing peers."""
    where = "" if directory == DEFAULT_DIR else f" --peers {directory}"
    return f"python -m bench.peers install {' '.join(names)}{where}"


def debian_line(name: str) -> str:
    """Return the command that installs the system libraries of peer `name`; empty when it needs none."""
    packages = RECIPES[name].debian
    return f"apt-get install {' '.join(packages)}" if packages else ""


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.peers", description="Installs the peers of kvtier's benchmarks."
    )
    parser.add_argument("action", choices=["install", "list"])
    parser.add_argument("names", nargs="*", metavar="PEER", help=f"of {', '.join(RECIPES)}; default: all")
    parser.add_argument("--peers", type=Path, default=DEFAULT_DIR, help="where the environments live")
    args = parser.parse_args(arguments)
    if unknown := set(args.names) - set(RECIPES):
        parser.error(f"unknown peer {', '.join(sorted(unknown))}; known: {', '.join(RECIPES)}")
    args.names = args.names or list(RECIPES)
    return args


def main() -> int:
    args = parse()
    for name in args.names:
        if args.action == "install":
            install(args.peers, name)
        state = "installed" if is_installed(args.peers, name) else "not installed"
        print(f"{name} {RECIPES[name].version}: {state} in {args.peers / name}")
        if line := debian_line(name):
            print(f"  its system libraries, on Debian: {line}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
