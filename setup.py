"""Builds the wheel and the source archive as pyproject.toml and MANIFEST.in say; this file does three more.

`kvtier.native` is C, for the stable interface of CPython 3.11: one wheel for all versions from there on.
Where no compiler is, or no header of Python, pip goes on without it, and Python does the same, slower: that
wheel says so in its name, py3-none-any. A free-threaded CPython has no such interface and is not asked.

The source archive keeps the links in src/kvtier as links. setuptools follows them, and the archive would hold
every module twice, or only in a place where no test looks.

    KVTIER_COMPILE=1 python -m pip install --no-deps --no-build-isolation .

compiles the planner, and what replay calls all the time, with mypyc; it needs mypy and a C compiler. The
same sources make the same decisions in two thirds of the time (docs/decisions/0018-compiled-planner.md).
An editable install never compiles the planner: a compiled module would shadow the source that somebody edits.
"""

import os
import sys
import sysconfig
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.sdist import sdist

PACKAGE = Path("src/kvtier")
COMPILED = (
    "appliance/core/**/*.py",
    "appliance/replay/fleet.py",
    "appliance/replay/shell.py",
    "appliance/replay/timed.py",
    "appliance/replay/untimed.py",
    "policies/candidates.py",
    "policies/costs.py",
)
#: states.py is enums, which mypyc leaves as they are; options.py is frozen and goes to other processes.
INTERPRETED = {"__init__.py", "options.py", "states.py"}
OPTIONS = (
    "--config-file=",
    "--explicit-package-bases",
    "--ignore-missing-imports",
    "--follow-imports=silent",
)


def compiled_modules() -> list[Any]:
    """Return the extension modules: none, unless KVTIER_COMPILE is 1."""
    if os.environ.get("KVTIER_COMPILE") != "1":
        return []
    if {"editable_wheel", "develop"} & set(sys.argv):
        sys.exit("KVTIER_COMPILE=1 is not for editable installs; leave it out, or install without --editable")
    from mypyc.build import mypycify

    os.environ["MYPYPATH"] = "src"
    paths = [path for pattern in COMPILED for path in sorted(PACKAGE.glob(pattern))]
    names = [str(path) for path in paths if path.name not in INTERPRETED]
    return list(mypycify([*OPTIONS, *names], opt_level="3", multi_file=True))


def native_module() -> Extension:
    """Return the extension module that every build tries to make."""
    return Extension(
        "kvtier.native._native",
        [str(path) for path in sorted(PACKAGE.glob("native/*.c"))],
        depends=[*map(str, sorted(PACKAGE.glob("native/*.h"))), "setup.py"],
        define_macros=[("Py_LIMITED_API", "0x030B0000")],
        extra_compile_args=["-O3", "-g0", "-fvisibility=hidden", "-ffp-contract=off", "-Wno-psabi"],
        extra_link_args=["-Wl,--build-id=none"],  # the same sources make the same wheel
        py_limited_api=True,
        optional=True,
    )


class HonestlyNamedWheel(bdist_wheel):
    """The command `bdist_wheel`: what holds no machine code is named as one for every machine."""

    def get_tag(self) -> tuple[str, str, str]:
        command = self.get_finalized_command("build_ext")
        is_built = bool(self.distribution.have_run.get("build_ext"))  # not yet, for an editable install
        if is_built and not any(map(os.path.exists, command.get_outputs())):
            self.root_is_pure = True
        tag: tuple[str, str, str] = super().get_tag()
        return tag


class SourceArchive(sdist):
    """The command `sdist`, with links stored as links."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        links = [path for path in PACKAGE.iterdir() if path.is_symlink()]
        behind = tuple(f"{link}/" for link in links)
        super().make_release_tree(base_dir, [name for name in files if not name.startswith(behind)])
        for link in links:
            Path(base_dir, link).symlink_to(link.readlink())


compiled = compiled_modules()
has_stable_interface = not sysconfig.get_config_var("Py_GIL_DISABLED")
setup(
    ext_modules=[*([native_module()] if has_stable_interface else []), *compiled],
    cmdclass={"sdist": SourceArchive, "bdist_wheel": HonestlyNamedWheel},
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if has_stable_interface and not compiled else {},
)
