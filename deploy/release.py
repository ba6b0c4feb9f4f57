"""Builds what is published into dist/ and checks each of it: `make dist`.

    kvtier-VERSION.tar.gz               source archive: the clone
    kvtier-VERSION-cp311-abi3-*.whl     installed where nothing else is, then served, put and got;
                                        py3-none-any without a compiler
    kvtier-VERSION.tgz                  Helm chart, rendered from the package with every set of values in ci/
    an image archive                    by `make image`, where its tools are

Everything is built from a copy of what git knows, so that nothing left behind by an earlier build gets in.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

import helm_python
import yaml

from tests.daemon import Daemon
from tests.distributions import ROOT, build_sdist, build_wheel, copy_clone, metadata_of, run

OUT = ROOT / "dist"
MADE = ("*.whl", "*.tar.gz", "*.tgz")
EXTRAS = "server,cli"
LICENSES = "Apache-2.0 AND BSD-2-Clause"
LICENSE_FILES = ["LICENSE", "native/LICENSE.xxHash"]
IMAGE_TOOLS = ("buildah",)


class CannotRelease(Exception):
    """Something that was built is not what it must be; the text says what."""


def contents(wheel: Path) -> dict[str, bytes]:
    """Return every file of a wheel but its own list of them."""
    with zipfile.ZipFile(wheel) as opened:
        names = [name for name in opened.namelist() if not name.endswith(".dist-info/RECORD")]
        return {name: opened.read(name) for name in names}


def check_same(one: Path, other: Path) -> None:
    """Compare two wheels. Raises CannotRelease with the names of the files that differ."""
    left, right = contents(one), contents(other)
    different = sorted(name for name in {*left, *right} if left.get(name) != right.get(name))
    if different:
        raise CannotRelease(f"{one.name} differs from the wheel of the source archive in {different[:5]}")


def check_metadata(archive: Path) -> None:
    """Check what an index of packages would refuse, and that the licence is named. Raises CannotRelease."""
    try:
        found = metadata_of(archive)
    except ExceptionGroup as wrong:
        raise CannotRelease(f"{archive.name}: {wrong.exceptions}") from wrong
    said = (found.license_expression, found.license_files, found.description_content_type)
    if said != (LICENSES, LICENSE_FILES, "text/markdown") or not found.description:
        raise CannotRelease(f"{archive.name} says of itself {said}")


def check_installed(wheel: Path, folder: Path) -> str:
    """Install a wheel in a new environment and use it from an empty folder; return what `--version` says.

    The libraries come from where pip is configured to look, in the versions of requirements.txt.
    """
    home, empty = folder / "environment", folder / "empty"
    empty.mkdir()
    venv.create(home, with_pip=False, symlinks=True)
    python, kvtier = home / "bin" / "python", home / "bin" / "kvtier"
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--python", str(python)]
    run([*pip, "install", f"{wheel}[{EXTRAS}]", "--constraint", str(ROOT / "requirements.txt")])
    version = run([str(kvtier), "--version"], empty).strip()
    with Daemon(empty, settings=("tiers.dram.capacity=64MiB",), python=str(python)) as daemon:
        script = ROOT / "examples" / "quickstart.py"
        said = run([str(python), "-c", script.read_text()], empty, {"KVTIER_TARGET": daemon.target})
        status = daemon.stop(signal.SIGTERM)
    if "2 blocks back, identical: True" not in said or status != 0:
        raise CannotRelease(f"put and get with {wheel.name} ended with {status}:\n{said}")
    return version


def build_chart(folder: Path, out: Path) -> Path:
    """Return the package of the chart in `folder`, written to `out`, checked against the folder."""
    package = Path(helm_python.package(str(folder), destination=str(out)))
    from_folder = helm_python.Chart.load(str(folder))
    from_package = helm_python.Chart.load_archive(package.read_bytes())
    for path in sorted((folder / "ci").glob("*-values.yaml")):
        values = yaml.safe_load(path.read_text())
        rendered = [
            chart.render(values, name="release", namespace="kvtier") for chart in (from_folder, from_package)
        ]
        if not any(rendered[1].values()) or rendered[0] != rendered[1]:
            raise CannotRelease(f"{package.name} renders {path.name} otherwise than the folder")
    try:
        # With nodes chosen: without them the templates refuse, schema or not.
        wrong = {"no such value": 1, "nodeSelector": {"kubernetes.io/os": "linux"}}
        from_package.render(wrong, name="release", namespace="kvtier")
    except helm_python.HelmError:
        return package  # the schema is in it
    raise CannotRelease(f"{package.name} has no schema: it takes a value that does not exist")


def missing_for_image() -> list[str]:
    """Return what `make image` would need and is not here."""
    missing = [tool for tool in IMAGE_TOOLS if shutil.which(tool) is None]
    if os.geteuid() != 0:
        missing.append("root")
    if subprocess.run(["make", "--dry-run", "image"], cwd=ROOT, capture_output=True, check=False).returncode:
        missing.append("a target `image` in the Makefile")
    return missing


def say(path: Path, text: str) -> None:
    """Print a line about something that is built and checked."""
    print(f"{path.relative_to(ROOT)}  {path.stat().st_size / 1e6:.2f} MB  {text}", flush=True)


def release(folder: Path) -> None:
    """Build and check everything. `folder` is for what is not kept. Raises CannotRelease."""
    clone = copy_clone(folder / "kvtier")
    sdist, wheel = build_sdist(clone, OUT), build_wheel(clone, OUT)
    check_same(wheel, build_wheel(sdist, folder / "from-archive"))
    for archive in (sdist, wheel):
        check_metadata(archive)
    say(sdist, "makes the same wheel")
    say(wheel, f"installed, served, put and got: {check_installed(wheel, folder)}")
    say(build_chart(clone / "helm" / "kvtier", OUT), "renders as the folder does, refuses what it should")


def main() -> int:
    """Fill dist/; return 0, or 1 with the reason."""
    if not (ROOT / ".git").exists():
        sys.exit("make dist needs a clone: git says which files belong to a release")
    if run(["git", "status", "--porcelain"], ROOT).strip():
        print("with changes that are not committed")
    OUT.mkdir(exist_ok=True)
    for old in [path for pattern in MADE for path in OUT.glob(pattern)]:
        old.unlink()
    try:
        with tempfile.TemporaryDirectory(prefix="kvtier-dist-") as folder:
            release(Path(folder))
    except (CannotRelease, RuntimeError) as failed:
        print(f"make dist: {failed}", file=sys.stderr)
        return 1
    if missing := missing_for_image():
        print(f"no image archive; missing: {', '.join(missing)}")
        return 0
    return subprocess.run(["make", "image"], cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
