"""Installs a list of requirements with torch for the CPU, without gigabytes of CUDA libraries.

    .venv/bin/python -m examples.torch_cpu requirements-demo.txt --system python3       (`make demo` does it)

PyPI's torch for Linux is the CUDA build. torch therefore comes from the first of these that has it:

1. the environment itself;
2. the interpreter that `--system` names, if its Python and its torch have the wanted minor versions: torch is
   linked, not copied;
3. PyTorch's index of builds for the CPU, if it answers within seconds;
4. where pip is configured to look. Only here can it be the CUDA build.

Everything else comes from where pip is configured to look. Says what is about to be downloaded before it is.
"""

import argparse
import json
import subprocess
import sys
import sysconfig
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
PROBE_LIMIT_S = 5.0  # a network that drops packets does not answer at all, and a name server may take as long
SIZE_LIMIT_S = 3.0
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "install")
PROBE = "import sys, urllib.request; urllib.request.urlopen(sys.argv[1], timeout=float(sys.argv[2])).read(1)"
#: Run by the system's interpreter; the folder it prints is that of torch's own files.
LOOK = """
import json, sys
from importlib import metadata
import torch
files = {str(path).split("/")[0] for path in metadata.files("torch")}
home = str(metadata.distribution("torch").locate_file(""))
print(json.dumps([list(sys.version_info[:2]), metadata.version("torch"), home, sorted(files)]))
"""


@dataclass(frozen=True, slots=True)
class InstallStep:
    """One run of `pip install`: what is installed, and the options that say from where."""

    what: tuple[str, ...]
    options: tuple[str, ...] = ()

    def plan(self) -> list[str]:
        """Return the addresses of what pip would fetch. Raises CalledProcessError, with pip's words."""
        command = [*PIP, "--dry-run", "--report", "-", *self.options, *self.what]
        planned = subprocess.run(command, capture_output=True, text=True, check=True)
        return [item["download_info"]["url"] for item in json.loads(planned.stdout)["install"]]

    def run(self) -> None:
        """Install. Raises CalledProcessError."""
        subprocess.run([*PIP, *self.options, *self.what], check=True)


def pins_of(file: Path) -> tuple[str, list[str]]:
    """Return the line that pins torch and all other lines. Raises SystemExit without the former."""
    lines = [line.partition("#")[0].strip() for line in file.read_text().splitlines()]
    torch = [line for line in lines if line.startswith("torch==")]
    if len(torch) != 1:
        sys.exit(f"{file} must pin torch once, as torch==VERSION")
    return torch[0], [line for line in lines if line and line not in torch]


def minor(version: str) -> list[str]:
    """Return the first two numbers of a version."""
    return version.split(".")[:2]


def version_here() -> str:
    """Return the version of torch in this environment, empty when there is none."""
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return ""


def link_system_torch(python: str, wanted: str) -> str:
    """Link torch of another interpreter into this environment; return its version, empty if it does not fit.

    It fits with the same minor versions of Python and of torch. A link, so that the libraries beside it are
    found where they were installed.
    """
    try:
        looked = subprocess.run([python, "-c", LOOK], capture_output=True, text=True, check=True)
        python_version, version, home, names = json.loads(looked.stdout)
    except (OSError, subprocess.CalledProcessError, ValueError):
        return ""  # no such interpreter, or no torch that it can import
    if python_version != list(sys.version_info[:2]) or minor(version) != minor(wanted.partition("==")[2]):
        return ""
    site = Path(sysconfig.get_path("purelib"))
    for name in names:
        if name not in ("..", "__pycache__"):
            (site / name).unlink(missing_ok=True)
            (site / name).symlink_to(Path(home, name))
    return str(version)


def unanswered(index: str) -> str:
    """Return why an index of packages cannot be used, empty when it answers."""
    command = [sys.executable, "-c", PROBE, f"{index}/torch/", str(PROBE_LIMIT_S)]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"no answer within {PROBE_LIMIT_S:g} s"
    return asked.stderr.strip().rpartition("\n")[2] if asked.returncode else ""


def steps(torch: str, others: list[str], index: str, options: tuple[str, ...]) -> list[InstallStep]:
    """Return what is to be run: torch from the index for the CPU if it has that release, else all by pip."""
    everything = InstallStep((torch, *others), options)
    here = version_here()
    if torch.partition("==")[2] in (here, here.partition("+")[0]):  # a pin may leave the build open
        return [everything]
    reason = unanswered(index)
    if not reason:
        from_index = InstallStep((torch,), ("--no-deps", "--index-url", index))
        try:
            from_index.plan()
        except subprocess.CalledProcessError:
            reason = f"it has no {torch} for this machine"
        else:
            return [from_index, InstallStep(tuple(others), options)]
    print(f"{index} is not used ({reason}); torch comes from where pip is configured to look")
    return [everything]


def size_of(url: str) -> int | None:
    """Return how many bytes are to be downloaded, None when the server does not tell."""
    if url.startswith("file:"):
        return 0
    try:
        asked = urllib.request.Request(url, method="HEAD")
        with urllib.request.urlopen(asked, timeout=SIZE_LIMIT_S) as answer:
            return int(answer.headers["Content-Length"])
    except (OSError, TypeError, ValueError):
        return None


def announcement(urls: list[str]) -> str:
    """Return how much is to be downloaded, with the largest file; empty if nothing is to be installed."""
    if not urls:
        return ""
    sizes = [size_of(url) for url in urls]
    known = [size for size in sizes if size is not None]
    num_remote = sum(size != 0 for size in sizes)
    if not num_remote:
        return f"{len(urls)} packages are installed; all of them are on this machine"
    unknown = f", {len(sizes) - len(known)} of them of unknown size" if len(known) < len(sizes) else ""
    largest, url = max((size or 0, url) for size, url in zip(sizes, urls, strict=True))
    name = url.rpartition("/")[2].partition("#")[0]
    of_which = f"; the largest is {name}, {megabytes(largest)}" if largest else ""
    return f"downloads {megabytes(sum(known))} in {num_remote} files{unknown}{of_which}"


def megabytes(num_bytes: int) -> str:
    """Return a size as text."""
    return f"{max(num_bytes / 1e6, 0.1):,.1f} MB" if num_bytes < 1e9 else f"{num_bytes / 1e9:.1f} GB"


def main(arguments: Sequence[str] | None = None) -> int:
    """Install; return 0. Exits with pip's status when it fails."""
    parser = argparse.ArgumentParser(prog="python -m examples.torch_cpu", description=__doc__)
    parser.add_argument("file", type=Path, help="requirements, one of them torch==VERSION")
    parser.add_argument("--system", metavar="PYTHON", help="interpreter with a torch that may be used")
    parser.add_argument("--no-deps", action="store_true", help="the file is complete; passed to pip")
    parser.add_argument("--index", default=CPU_INDEX, help="of builds for the CPU, default: %(default)s")
    args = parser.parse_args(arguments)
    torch, others = pins_of(args.file)
    options = ("--no-deps",) if args.no_deps else ()
    try:
        if args.system and not version_here() and (version := link_system_torch(args.system, torch)):
            print(f"torch {version} of {args.system} is used")
            todo = [InstallStep(tuple(others), options)]
        else:
            todo = steps(torch, others, args.index, options)
        if text := announcement([url for step in todo for url in step.plan()]):
            print(f"{args.file.name}: {text}", flush=True)
        for step in todo:
            step.run()
    except subprocess.CalledProcessError as failed:
        print(failed.stderr or "", end="", file=sys.stderr)  # of a plan; what fails later has been seen
        return failed.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
