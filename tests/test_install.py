"""Every way to install kvtier, tried from every folder in which a user may stand.

A clone lies in a folder named `kvtier`, as `git clone` leaves it. Python searches the folder of a script, or
the current one, before site-packages: were the root of the clone a package, a script beside the clone would
import that, and pytest would take the root for the package (docs/decisions/0001-top-level-folders.md).
"""

import json
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import kvtier

from .distributions import (
    Environment,
    all_libraries,
    build_sdist,
    build_wheel,
    copy_clone,
    tracked,
)

WAYS = ("wheel", "sdist", "editable")
FOLDERS = ("empty", "clone", "parent")
MADE = {"PKG-INFO", "setup.cfg"}  # by setuptools, in every source archive

SCRIPT = """
import json, os
import kvtier.v1
from kvtier.v1 import kvcache_pb2
from kvtier.testing import FakeAppliance
with FakeAppliance().client() as client:
    client.info
print(json.dumps([os.path.dirname(kvtier.__file__), kvtier.__version__, os.path.dirname(kvtier.v1.__file__)]))
"""


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone in a folder named kvtier, with nothing else beside it."""
    return copy_clone(tmp_path_factory.mktemp("parent") / "kvtier")


@pytest.fixture(scope="module")
def sdist(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source archive of that clone."""
    return build_sdist(clone, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module", params=WAYS)
def installed(
    request: pytest.FixtureRequest, clone: Path, sdist: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Environment, Path]:
    """An environment with kvtier installed in one way, and the folder that `import kvtier` must find."""
    home = tmp_path_factory.mktemp(request.param)
    environment = Environment(home / "venv", all_libraries())
    if request.param == "editable":
        environment.install("--editable", str(clone))
        return environment, clone / "src" / "kvtier"
    environment.install(str(build_wheel(clone, home) if request.param == "wheel" else sdist))
    return environment, environment.site / "kvtier"


@pytest.fixture(params=FOLDERS)
def folder(request: pytest.FixtureRequest, clone: Path, tmp_path: Path) -> Path:
    """A folder to stand in."""
    return {"empty": tmp_path, "clone": clone, "parent": clone.parent}[request.param]


def test_the_installed_package_is_found_from_everywhere(
    installed: tuple[Environment, Path], folder: Path, tmp_path: Path
) -> None:
    environment, package = installed
    # The script lies in the folder, as a user's would, but has a name of its own: the clone stays as it is.
    script = folder / "uses_kvtier.py"
    script.write_text(SCRIPT)
    try:
        answers = [
            json.loads(environment.run(*how, cwd=where))
            for how, where in ((("-c", SCRIPT), folder), ((str(script),), tmp_path))
        ]
    finally:
        script.unlink()
    for place, version, wire in answers:
        assert (Path(place), version) == (package, kvtier.__version__)
        assert Path(wire).resolve() == (package / "v1").resolve()
    for module in ("kvtier", "kvtier.appliance.cli"):
        answer = environment.run("-m", module, "--version", cwd=folder)
        assert answer.strip() == f"kvtier, version {kvtier.__version__}"


def test_the_source_archive_is_the_clone(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        members = {member.name.partition("/")[2]: member for member in archive.getmembers()}
    files = {name for name, member in members.items() if not member.isdir()}
    assert {name for name in files if ".egg-info/" not in name} == {*tracked(), *MADE}
    links = {name: member.linkname for name, member in members.items() if member.issym()}
    assert links["src/kvtier/v1"] == "../../proto/kvtier/v1"
    assert members[".ci/run"].mode & 0o100, "what is executable stays so"


def test_the_source_archive_makes_the_same_wheel(sdist: Path, clone: Path, tmp_path: Path) -> None:
    from_archive = zipfile.ZipFile(build_wheel(sdist, tmp_path / "archive"))
    from_clone = zipfile.ZipFile(build_wheel(clone, tmp_path / "clone"))
    contents = [
        {name: wheel.read(name) for name in wheel.namelist() if not name.endswith("/RECORD")}
        for wheel in (from_archive, from_clone)
    ]
    assert contents[0] == contents[1]


@pytest.mark.parametrize("parent", ["plain", "with a space"])
def test_tests_are_collected_in_a_clone_named_kvtier(parent: str, tmp_path: Path) -> None:
    """In a bare clone: what is installed for this interpreter is not what must be found."""
    clone = copy_clone(tmp_path / parent / "kvtier")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_wire.py"]
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "PYTEST"))
    }
    done = subprocess.run(command, cwd=clone, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
