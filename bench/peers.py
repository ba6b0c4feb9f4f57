"""`python -m bench.peers install [mooncake] [lmcache] [--peers DIR]`: the peers' own virtual environments.

A peer pins versions of numpy, protobuf and torch that are none of ours, so each lives in an environment of
its own and is driven through a pipe (`bench/worker.py`); nothing here is ever imported into kvtier's process.
Installing them with kvtier in one environment was rejected: LMCache alone wants numpy<=2.2.6 and a protobuf
older than ours.

LMCache is installed without its dependencies, followed by a list of what its CPU path imports: its metadata
demands CUDA packages, which do not install on a machine without a GPU toolchain. torch is pinned because
LMCache 0.5.6 is built against that release's ABI.
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

TORCH = "torch==2.13.0"
LMCACHE_NEEDS = [
    "aiofile",
    "aiofiles",
    "blake3",
    "aiohttp",
    "awscrt",
    "cryptography",
    "fastapi",
    "httpx",
    "huggingface_hub>=1.5.0",
    "msgspec",
    "numpy<=2.2.6",
    "numba",
    "nvtx",
    "opentelemetry-api>=1.20.0,<=1.40.0",
    "opentelemetry-sdk>=1.20.0",
    "opentelemetry-exporter-otlp>=1.20.0",
    "opentelemetry-exporter-prometheus<=0.61b0,>=0.50b0",
    "prometheus_client>=0.18.0,<=0.24.1",
    "psutil",
    "py-cpuinfo",
    "pyyaml",
    "pyzmq>=25.0.0",
    "grpcio>=1.78.0",
    "protobuf>=6.31.1,<7",
    "redis",
    "safetensors",
    "sortedcontainers",
    "transformers>=5.4",
    "uvicorn",
    "httptools",
    "xxhash",
    "cachetools",
    "setuptools<81",
]


@dataclass(frozen=True, slots=True)
class PeerRecipe:
    """How one peer is installed: `steps` are argument lists of `pip install`, run in order.

    `debian` are the packages with the system libraries that the peer's programs are linked against.
    """

    name: str
    version: str
    steps: tuple[tuple[str, ...], ...]
    debian: tuple[str, ...] = ()


RECIPES = {
    recipe.name: recipe
    for recipe in (
        PeerRecipe(
            "mooncake",
            "0.3.13.post1",
            (("numpy", "mooncake-transfer-engine-non-cuda==0.3.13.post1"),),
            debian=("libibverbs1", "librdmacm1", "libnuma1", "libcurl4"),
        ),
        PeerRecipe(
            "lmcache",
            "0.5.6",
            ((TORCH,), (*LMCACHE_NEEDS, TORCH), ("--no-deps", "lmcache==0.5.6")),
        ),
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
    for step in RECIPES[name].steps:
        print(f"{name}: pip install {' '.join(step)}", flush=True)
        command = [str(python_of(directory, name)), "-m", "pip", "install", "--quiet", *step]
        subprocess.run([*command, "--disable-pip-version-check"], check=True)
    (directory / name / "kvtier-recipe").write_text(RECIPES[name].version)


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
