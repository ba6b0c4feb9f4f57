"""Builds and installs what users install: wheel, source archive, editable install.

Offline: the build tools and libraries are those this interpreter has already.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest
from packaging.metadata import Metadata

ROOT = Path(__file__).resolve().parent.parent
OFFLINE = ("--quiet", "--disable-pip-version-check", "--no-index", "--no-deps")
SDIST = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"


def tracked() -> list[str]:
    """Return the paths of all files that git knows or would add, and that are there."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return sorted(name for name in set(listed.stdout.split("\0")) if name and os.path.lexists(ROOT / name))


def copy_clone(folder: Path) -> Path:
    """Copy what git knows into `folder`, links as links, and return it: building leaves files behind."""
    folder.mkdir(parents=True)
    packed = subprocess.run(
        ["tar", "--create", "--null", "--files-from=-"],
        cwd=ROOT,
        input="\0".join(tracked()).encode(),
        capture_output=True,
        check=True,
    )
    subprocess.run(["tar", "--extract", "--directory", str(folder)], input=packed.stdout, check=True)
    return folder


def has_compiler() -> bool:
    """Whether native/ can be built here: a C compiler, the headers of this Python, a stable interface."""
    headers = Path(sysconfig.get_path("include"), "Python.h")
    return bool(shutil.which("cc") and headers.exists() and not sysconfig.get_config_var("Py_GIL_DISABLED"))


def build_wheel(source: Path, out: Path) -> Path:
    """Return the wheel of a clone or a source archive, written to the folder `out`."""
    command = [sys.executable, "-m", "pip", "wheel", *OFFLINE, "--no-build-isolation"]
    run([*command, "--wheel-dir", str(out), str(source)])
    [found] = out.glob("kvtier-*.whl")
    return found


def build_sdist(clone: Path, out: Path) -> Path:
    """Return the source archive of a clone, written to the folder `out`."""
    run([sys.executable, "-c", SDIST, str(out)], clone)
    [found] = out.glob("kvtier-*.tar.gz")
    return found


def metadata_of(archive: Path) -> Metadata:
    """Return what a wheel or a source archive says of itself.

    Raises ExceptionGroup with everything that an index of packages would refuse.
    """
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            [name] = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
            return Metadata.from_email(wheel.read(name))
    with tarfile.open(archive) as packed:
        found = packed.extractfile(f"{archive.name.removesuffix('.tar.gz')}/PKG-INFO")
        assert found is not None
        return Metadata.from_email(found.read())


def all_libraries() -> list[str]:
    """Return what stands in this interpreter's site-packages, less kvtier and what starts by itself."""
    names = (path.name for path in Path(sysconfig.get_path("purelib")).iterdir())
    return [name for name in names if "kvtier" not in name and not name.endswith(".pth")]


class Environment:
    """A virtual environment in `home` that has the named libraries of this interpreter, and nothing else."""

    def __init__(self, home: Path, libraries: Iterable[str]) -> None:
        venv.create(home, with_pip=False, symlinks=True)
        self.home, self.python = home, home / "bin" / "python"
        places = {"base": str(home), "platbase": str(home)}
        self.site = Path(sysconfig.get_path("purelib", "venv", vars=places))
        linked, there = home / "libraries", Path(sysconfig.get_path("purelib"))
        linked.mkdir()
        for name in libraries:
            if (there / name).exists():
                (linked / name).symlink_to(there / name)
        (self.site / "libraries.pth").write_text(f"{linked}\n")

    def install(self, *what: str) -> None:
        """Install a wheel, a source archive, or `--editable` and a clone."""
        command = [sys.executable, "-m", "pip", "--python", str(self.python), "install", *OFFLINE]
        run([*command, "--no-build-isolation", "--no-compile", *what])

    def run(self, *arguments: str, cwd: Path) -> str:
        """Run its Python with `arguments` in a folder; return the output."""
        return run([str(self.python), *arguments], cwd)


def run(command: list[str], cwd: Path | None = None, more: Mapping[str, str] | None = None) -> str:
    """Run a command without this process's PYTHON* settings; return its output.

    `more` is added to the environment. Raises RuntimeError with all output when the command fails.
    """
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    environment.update(more or {})
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout}\n{done.stderr}")
    return done.stdout
