"""What is in the image, and what is not."""

import os
import stat
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.audit import pins
from tests.deploy.test_image import ROOT
from tests.helm.charts import of_kind, render

from .engine import Engine

#: Uncompressed: /opt/kvtier, two thirds of which are numba with llvmlite and numpy; the whole image on the
#: base that `make image BASE=debian` makes, which is 168 MB.
OURS_BYTES, WHOLE_BYTES = 390_000_000, 580_000_000
TOP = {
    *(
        "bin",
        "boot",
        "dev",
        "etc",
        "home",
        "lib",
        "lib64",
        "media",
        "mnt",
        "opt",
        "proc",
        "root",
        "run",
        "sbin",
    ),
    *("srv", "sys", "tmp", "usr", "var"),
}
INSTALLERS = {"pip", "pip3", "easy_install", "conda", "uv"}
COMPILERS = {"cc", "gcc", "g++", "c++", "clang", "as", "ld", "make", "nvcc", "rustc", "cargo"}
LEFTOVERS = (".proto", ".pyi", ".pxd", ".whl")


@pytest.fixture(scope="module")
def root(engine: Engine, image: str) -> Iterator[Path]:
    with engine.mounted(image) as mounted:
        yield mounted


def files(folder: Path) -> Iterator[Path]:
    """Yield every file below a folder; links are not followed."""
    for path, _, names in os.walk(folder):
        yield from (Path(path, name) for name in names)


def packages(root: Path) -> Path:
    [found] = (root / "opt" / "kvtier" / "lib").glob("python3.*/site-packages")
    return found


def is_compiled(source: Path, root: Path) -> bool:
    """Whether a module has a compiled file of the image's Python that is used without reading the source."""
    version = packages(root).parent.name.removeprefix("python").replace(".", "")
    cached = source.parent / "__pycache__" / f"{source.stem}.cpython-{version}.pyc"
    return cached.is_file() and struct.unpack("<I", cached.read_bytes()[4:8]) == (0b01,)


def test_nothing_can_install_or_compile(root: Path) -> None:
    programs = {
        path.name
        for folder in ("bin", "sbin", "usr/bin", "usr/sbin", "usr/local/bin", "opt/kvtier/bin")
        for path in (root / folder).iterdir()
    }
    assert programs & (INSTALLERS | COMPILERS) == set()
    assert [path for path in root.rglob("pip") if path.is_dir()] == []
    assert list(root.rglob("ensurepip")) == []


def test_only_what_runs_is_there(root: Path) -> None:
    assert {path.name for path in root.iterdir()} == TOP
    assert [path.name for path in (root / "opt").iterdir()] == ["kvtier"]
    names = {path.name for path in (root / "opt" / "kvtier" / "bin").iterdir()}
    assert {name for name in names if not name.startswith("python")} == {"kvtier"}
    assert [path for path in files(root / "opt") if path.suffix in LEFTOVERS] == []
    assert list((root / "opt").rglob("tests")) == []
    assert not (packages(root) / "pytest").exists()
    for empty in ("tmp", "mnt", "srv", "home", "run/kvtier", "var/lib/kvtier"):
        assert list(files(root / empty)) == [], empty


def test_every_package_is_there_in_its_version(root: Path) -> None:
    found = {path.name.removesuffix(".dist-info") for path in packages(root).glob("*.dist-info")}
    have = {name.partition("-")[0].replace("_", "-").lower(): name.partition("-")[2] for name in found}
    version = have.pop("kvtier")
    wanted = {
        name.replace("_", "-").lower(): v
        for name, v in pins((ROOT / "requirements-image.txt").read_text()).items()
    }
    assert {name.replace(".", "-"): v for name, v in have.items()} == wanted
    [licence] = (packages(root) / f"kvtier-{version}.dist-info").rglob("LICENSE")
    assert licence.read_bytes() == (ROOT / "LICENSE").read_bytes()


def test_every_module_is_compiled(root: Path) -> None:
    """The root is read-only: what is not compiled here is compiled by each process again."""
    ours = [path for path in files(root / "opt") if path.suffix == ".py"]
    assert len(ours) > 1500
    assert [path for path in ours if not is_compiled(path, root)] == []
    for module in ("asyncio/events.py", "dataclasses.py", "json/decoder.py", "ssl.py", "typing.py"):
        [source] = [
            path for top in ("usr", "usr/local") for path in root.glob(f"{top}/lib/python3.*/{module}")
        ]
        assert is_compiled(source, root), source


def test_files_are_roots_and_the_daemons_folders_are_its_own(root: Path) -> None:
    for path in files(root / "opt"):
        status = path.lstat()
        assert (status.st_uid, status.st_gid) == (0, 0), path
        assert path.is_symlink() or not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH), path
        assert path.is_symlink() or status.st_mode & stat.S_IROTH, path
    [daemonset] = of_kind(render({}), "DaemonSet")
    security = daemonset["spec"]["template"]["spec"]["securityContext"]
    for folder in ("run/kvtier", "var/lib/kvtier"):
        status = (root / folder).stat()
        assert (status.st_uid, status.st_gid) == (security["runAsUser"], security["runAsGroup"])
        assert stat.S_IMODE(status.st_mode) == 0o750


def test_the_image_says_how_it_is_run(engine: Engine, image: str) -> None:
    said = engine.inspect("image", image)
    assert said["Config"]["User"] == "10001:10001"
    assert said["Config"]["StopSignal"] == "SIGTERM"
    assert said["Config"]["Labels"]["org.opencontainers.image.version"] == image.rpartition(":")[2]
    assert said["Healthcheck"]["Test"][0] == "CMD"


def test_it_is_no_larger_than_the_page_says(engine: Engine, image: str, root: Path) -> None:
    assert sum(path.lstat().st_size for path in files(root / "opt")) < OURS_BYTES
    assert engine.inspect("image", image)["Size"] < WHOLE_BYTES
