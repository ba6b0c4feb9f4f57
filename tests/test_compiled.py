"""What may be compiled (setup.py). That it then means the same is for `make compiled` to show."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
SETUP = ROOT / "setup.py"
#: A test that sets a constant of a module, in one of two ways.
PATCHES = (
    re.compile(r'set(?:attr|item)\((?:vars\()?(\w+)\)?, "([A-Z_]+)"'),
    re.compile(r'vars\((\w+)\)\["([A-Z_]+)"\]'),
)


def constant(name: str) -> Any:
    """Return the value of a constant of setup.py, which builds when it is imported."""
    for statement in ast.parse(SETUP.read_text()).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == name:
            return ast.literal_eval(statement.value)
    raise AssertionError(f"setup.py has no {name}")


def compiled() -> dict[Path, ast.Module]:
    """Return the modules that are compiled, parsed."""
    paths = {path for pattern in constant("COMPILED") for path in ROOT.glob(pattern)}
    return {path: ast.parse(path.read_text()) for path in paths if path.name not in constant("INTERPRETED")}


@pytest.mark.parametrize("pattern", constant("COMPILED"))
def test_each_pattern_names_modules(pattern: str) -> None:
    assert list(ROOT.glob(pattern)), f"setup.py compiles {pattern}, and there is no such module"


def test_modules_left_out_exist() -> None:
    names = {path.name for pattern in constant("COMPILED") for path in ROOT.glob(pattern)}
    assert names >= constant("INTERPRETED")


def test_an_editable_install_is_never_compiled(tmp_path: Path) -> None:
    command = [sys.executable, str(SETUP), "-q", "editable_wheel", "--dist-dir", str(tmp_path)]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "KVTIER_COMPILE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "not for editable installs" in done.stderr
    assert not list(tmp_path.iterdir())


def test_no_compiled_function_sets_a_variable_of_another() -> None:
    """mypyc compiles `nonlocal` into something else without a word."""
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path, module in compiled().items()
        for node in ast.walk(module)
        if isinstance(node, ast.Nonlocal)
    ]
    assert found == []


def test_no_constant_that_a_test_sets_is_final_where_it_is_compiled() -> None:
    """mypyc writes the value of a Final into the code: what a test sets then changes nothing."""
    finals = {
        (path.stem, ast.unparse(node.target))
        for path, module in compiled().items()
        for node in module.body
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation).startswith("Final")
    }
    assert len(finals) > 5
    set_by_tests = {
        found
        for path in (ROOT / "tests").rglob("*.py")
        for patch in PATCHES
        for found in patch.findall(path.read_text())
    }
    assert {("put_job", "MIN_RUN"), ("source_speed", "DEFAULT_BYTES_PER_S")} <= set_by_tests
    assert finals & set_by_tests == set()


def test_no_name_of_a_generator_is_given_to_next() -> None:
    """mypyc compiles a generator that has a name into a list, of which there is no next one."""
    found = []
    for path, module in compiled().items():
        named = {
            ast.unparse(node.targets[0])
            for node in ast.walk(module)
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.GeneratorExp)
        }
        found += [
            f"{path.relative_to(ROOT)}:{node.lineno}"
            for node in ast.walk(module)
            if isinstance(node, ast.Call)
            and ast.unparse(node.func) == "next"
            and ast.unparse(node.args[0]) in named
        ]
    assert found == []


def test_no_interpreted_class_derives_from_a_compiled_one() -> None:
    """Making one raises TypeError, which no test sees that is not compiled."""
    modules = compiled()
    bases = {
        node.name
        for module in modules.values()
        for node in module.body
        if isinstance(node, ast.ClassDef)
        and not {"NamedTuple", "Protocol"} & set(map(ast.unparse, node.bases))
    }
    assert "TimedShell" in bases
    product = {
        path for folder in ("appliance", "policies", "tiers") for path in (ROOT / folder).rglob("*.py")
    }
    found = []
    for path in sorted(product - modules.keys()):
        module = ast.parse(path.read_text())
        imported = {
            alias.asname or alias.name
            for node in ast.walk(module)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
            if alias.name in bases
        }
        found += [
            f"{path.relative_to(ROOT)}: {node.name}"
            for node in ast.walk(module)
            if isinstance(node, ast.ClassDef) and imported & set(map(ast.unparse, node.bases))
        ]
    assert found == []
