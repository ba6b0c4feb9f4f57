"""The wheel: only `kvtier/` in it, with stubs and .proto files, and a client that works from anywhere.

Built and installed offline: the build tools and libraries are those this interpreter has already.
"""

import json
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CLIENT_PACKAGES = ("grpc", "google", "numpy", "numpy.libs", "typing_extensions.py")  # what a runtime has
HEAVY = ("torch", "xxhash", "pydantic", "click", "kvtier.appliance", "kvtier.tiers", "kvtier.policies")

LOOK = """
import json, sys
import kvtier
kvtier.Client
after_client = sorted(sys.modules)
import kvtier.testing
with kvtier.testing.FakeAppliance().client() as client:
    version = client.info.version
print(json.dumps({"file": kvtier.__file__, "after_client": after_client, "all": sorted(sys.modules)}))
"""


def tracked() -> list[str]:
    """Return the paths of all files that git knows and that are there."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [name for name in listed.stdout.split("\0") if name and os.path.lexists(ROOT / name)]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of what git knows, built from a copy: building leaves folders behind."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    archive = subprocess.run(
        ["tar", "--create", "--null", "--files-from=-"],
        cwd=ROOT,
        input="\0".join(tracked()).encode(),
        capture_output=True,
        check=True,
    )
    subprocess.run(["tar", "--extract", "--directory", str(source)], input=archive.stdout, check=True)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    command += ["--no-index", "--disable-pip-version-check", "--wheel-dir", str(out), str(source)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    [found] = out.glob("kvtier-*.whl")
    return found


def test_only_kvtier_is_in_it_and_all_of_it(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    [information] = [top for top in tops if top.endswith(".dist-info")]
    assert tops == {"kvtier", information}
    parts = {name.split("/")[1] for name in names if name.startswith("kvtier/")}
    assert parts == {
        *("__init__.py", "testing.py", "py.typed"),
        *("appliance", "clients", "policies", "tiers", "v1"),
    }
    for folder in ("appliance", "clients", "policies", "tiers"):
        there = {name for name in names if name.startswith(f"kvtier/{folder}/")}
        assert there == {f"kvtier/{name}" for name in tracked() if name.startswith(f"{folder}/")}
    for proto in (ROOT / "proto" / "kvtier" / "v1").glob("*.proto"):
        stem = proto.stem
        wanted = [f"{stem}.proto", f"{stem}_pb2.py", f"{stem}_pb2.pyi", f"{stem}_pb2_grpc.py"]
        assert {f"kvtier/v1/{name}" for name in wanted} <= set(names)


def test_an_installed_client_works_anywhere_and_imports_no_server(wheel: Path, tmp_path: Path) -> None:
    home, empty, libraries = tmp_path / "venv", tmp_path / "empty", tmp_path / "libraries"
    empty.mkdir()
    libraries.mkdir()
    venv.create(home, with_pip=False, symlinks=True)
    python = home / "bin" / "python"
    installed = Path(sysconfig.get_path("purelib", "venv", vars={"base": str(home), "platbase": str(home)}))
    site = Path(sysconfig.get_path("purelib"))
    for name in CLIENT_PACKAGES:  # these alone: what a client needs beyond them would fail to import
        if (site / name).exists():
            (libraries / name).symlink_to(site / name)
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps"]
    command += ["--no-index", "--disable-pip-version-check", "--no-compile", str(wheel)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (installed / "libraries.pth").write_text(f"{libraries}\n")
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    looked = subprocess.run(
        [str(python), "-c", LOOK], cwd=empty, env=environment, capture_output=True, text=True, check=False
    )
    assert looked.returncode == 0, looked.stderr
    found = json.loads(looked.stdout)
    assert Path(found["file"]) == installed / "kvtier" / "__init__.py"
    for when in ("after_client", "all"):
        loaded = [
            name for name in found[when] if name in HEAVY or name.startswith(tuple(f"{h}." for h in HEAVY))
        ]
        assert loaded == []
    assert "grpc" not in found["after_client"], "it costs a runtime 0.2 s, and the local channel needs none"
    assert (home / "bin" / "kvtier").exists(), "the command line is installed, too"
