"""The wheel: only `kvtier/` in it, with stubs and .proto files, and a client that imports no server."""

import ast
import json
import zipfile
from pathlib import Path

import pytest

from .distributions import (
    ROOT,
    Environment,
    build_wheel,
    copy_clone,
    has_compiler,
    metadata_of,
    tracked,
)

CLIENT_PACKAGES = ("grpc", "google", "numpy", "numpy.libs", "typing_extensions.py")  # what a runtime has
HEAVY = ("torch", "xxhash", "pydantic", "click", "kvtier.appliance", "kvtier.tiers", "kvtier.policies")

NATIVE = {"kvtier/native/_native.abi3.so"}  # there if a compiler was
LICENCES = {"native/LICENSE.xxHash"}  # stands with kvtier's own

#: What costs a runtime time to import and is needed by some only: calls to other hosts, asyncio, TLS.
ON_DEMAND = ("grpc", "asyncio", "ssl")

LOOK = """
import json, sys
import kvtier.clients
kvtier.Client
after_client = sorted(sys.modules)
import kvtier.testing
with kvtier.testing.FakeAppliance().client() as client:
    version = client.info.version
print(json.dumps({"file": kvtier.__file__, "after_client": after_client, "all": sorted(sys.modules)}))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of what git knows."""
    source = copy_clone(tmp_path_factory.mktemp("source") / "kvtier")
    return build_wheel(source, tmp_path_factory.mktemp("wheel"))


def test_only_kvtier_is_in_it_and_all_of_it(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    [information] = [top for top in tops if top.endswith(".dist-info")]
    assert tops == {"kvtier", information}
    assert f"{information}/licenses/LICENSE" in names
    parts = {name.split("/")[1] for name in names if name.startswith("kvtier/")}
    assert parts == {
        *("__init__.py", "__main__.py", "lazy.py", "testing.py", "py.typed"),
        *("appliance", "clients", "native", "policies", "sources", "tiers", "v1"),
    }
    for folder in ("appliance", "clients", "native", "policies", "sources", "tiers"):
        there = {name for name in names if name.startswith(f"kvtier/{folder}/")} - NATIVE
        assert there == {f"kvtier/{name}" for name in wanted_of(folder)}
    for proto in (ROOT / "proto" / "kvtier" / "v1").glob("*.proto"):
        stem = proto.stem
        wanted = [f"{stem}.proto", f"{stem}_pb2.py", f"{stem}_pb2.pyi"]
        wanted += [f"{stem}_pb2_grpc.py"] * ("\nservice " in proto.read_text())
        assert {f"kvtier/v1/{name}" for name in wanted} <= set(names)


def wanted_of(folder: str) -> set[str]:
    """Return the files of a top-level folder that belong beside its modules."""
    return {name for name in tracked() if name.startswith(f"{folder}/")} - LICENCES


def test_stand_ins_of_the_tests_are_not_in_it_and_nothing_in_it_imports_them(wheel: Path) -> None:
    """A GPU of the tests is no device of a daemon. `kvtier.testing`, a product of its own, stays."""
    archive = zipfile.ZipFile(wheel)
    modules = {name: ast.parse(archive.read(name)) for name in archive.namelist() if name.endswith(".py")}
    assert [name for name in modules if name.startswith("kvtier/tiers/") and "fake" in name] == []
    imported = {(name, top) for name, module in modules.items() for top in _imported(module)}
    assert sorted((name, top) for name, top in imported if top in ("tests", "bench")) == []
    assert any(top == "numpy" for _, top in imported), "imports are found at all"


def _imported(module: ast.Module) -> set[str]:
    """Return the top-level packages that a module imports by an absolute name, anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.split(".")[0])
    return found


def test_an_index_would_take_what_it_says_of_itself(wheel: Path) -> None:
    found = metadata_of(wheel)
    assert found.license_expression == "Apache-2.0 AND BSD-2-Clause"
    assert found.license_files == ["LICENSE", "native/LICENSE.xxHash"]
    assert found.description_content_type == "text/markdown"
    assert found.requires_dist is not None
    always = [wanted.name for wanted in found.requires_dist if wanted.marker is None]
    assert always == ["grpcio", "protobuf", "numpy"], "what a runtime installs"
    with zipfile.ZipFile(wheel) as opened:
        for file in found.license_files:
            [name] = [name for name in opened.namelist() if name.endswith(f"/licenses/{file}")]
            assert opened.read(name) == (ROOT / file).read_bytes()


@pytest.mark.parametrize("compiler", ["cc", "false"])
def test_a_wheel_says_in_its_name_whether_it_holds_machine_code(
    compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_compiler():
        pytest.skip("no C compiler, or no headers of Python")
    monkeypatch.setenv("CC", compiler)
    made = build_wheel(copy_clone(tmp_path / "kvtier"), tmp_path / "wheel")
    is_built = {*zipfile.ZipFile(made).namelist()} >= NATIVE
    assert is_built == (compiler == "cc")
    assert made.stem.split("-", 2)[2].startswith("cp311-abi3-linux" if is_built else "py3-none-any"), made


def test_an_installed_client_works_anywhere_and_imports_no_server(wheel: Path, tmp_path: Path) -> None:
    environment, empty = Environment(tmp_path / "venv", CLIENT_PACKAGES), tmp_path / "empty"
    empty.mkdir()
    environment.install(str(wheel))
    found = json.loads(environment.run("-c", LOOK, cwd=empty))
    assert Path(found["file"]) == environment.site / "kvtier" / "__init__.py"
    for when in ("after_client", "all"):
        loaded = [
            name for name in found[when] if name in HEAVY or name.startswith(tuple(f"{h}." for h in HEAVY))
        ]
        assert loaded == []
    assert set(ON_DEMAND) & set(found["after_client"]) == set()
    assert (environment.home / "bin" / "kvtier").exists(), "the command line is installed, too"
