"""Native code is there where it can be, refused where it must be, and built again when it changes."""

import subprocess
import sys

import pytest

from kvtier import native

from ..distributions import ROOT, has_compiler

SAY = "import sys; sys.abiflags += {flags!r}; from kvtier import native; print(native.absence)"


def absence(flags: str = "", **environment: str) -> str:
    """Return why a new process takes the twins; empty where it does not."""
    command = [sys.executable, "-c", SAY.format(flags=flags)]
    places = {"PYTHONPATH": str(ROOT / "src"), "PATH": "/usr/bin"}
    done = subprocess.run(command, env=places | environment, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.mark.skipif(not has_compiler(), reason="no C compiler, or no headers of Python")
def test_it_is_built_where_a_compiler_is() -> None:
    assert native.absence in ("", "KVTIER_NATIVE=off")
    assert (native.native is None) == bool(native.absence)


def test_it_is_refused_where_it_must_be() -> None:
    assert absence(KVTIER_NATIVE="off") == "KVTIER_NATIVE=off"
    assert absence("t") == "this Python is free-threaded"


@pytest.mark.parametrize("source", ["native/_native.c", "native/xxh3.h", "setup.py"])
def test_environments_are_made_again_when_a_source_changes(source: str) -> None:
    """By what make says it would do if that source were newer."""
    asked = ["make", "--dry-run", "--what-if", source, ".venv/.ready"]
    said = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "--editable ." in said
