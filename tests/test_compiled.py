"""What may be compiled (setup.py). That it then means the same is for `make compiled` to show."""

import ast
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
SETUP = ROOT / "setup.py"


def constant(name: str) -> Any:
    """Return the value of a constant of setup.py, which builds when it is imported."""
    for statement in ast.parse(SETUP.read_text()).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == name:
            return ast.literal_eval(statement.value)
    raise AssertionError(f"setup.py has no {name}")


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
