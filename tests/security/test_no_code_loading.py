"""Nothing that is shipped turns bytes into code: held over the syntax tree of every module, and at run time.

The table of exceptions is short, each with its reason, and an exception that nobody needs any more fails.
"""

import ast
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import kvtier

from ..appliance.conftest import small_settings
from ..appliance.loops import DaemonThread
from ..appliance.raw_client import RawClient, chain

PACKAGE = Path(kvtier.__file__).parent

#: Modules whose very purpose is to make objects or code of bytes.
MODULES = {
    "pickle", "cPickle", "_pickle", "pickletools", "marshal", "shelve", "dill", "cloudpickle", "joblib",
    "jsonpickle", "code", "codeop", "runpy", "imp",
}  # fmt: skip
BUILTINS = {"eval", "exec", "compile", "__import__"}
#: Calls by their last two names, or by their last one where that says it all.
CALLS = {
    "yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load", "yaml.unsafe_load_all",
    "torch.load", "numpy.load", "np.load", "os.system", "os.popen", "ctypes.pythonapi",
    "importlib.import_module", "util.module_from_spec", "loader.exec_module",
    "pkg_resources.load_entry_point", "recv_pyobj", "send_pyobj", "load_module",
    "SourceFileLoader", "FunctionType", "CodeType",
}  # fmt: skip
ALLOWED = {
    ("native/__init__.py", "importlib.import_module"): "one module of the package, where it was built",
    ("policies/registry.py", "importlib.import_module"): "policy classes of policy.allowed_modules only",
    ("src/kvtier/lazy.py", "importlib.import_module"): "public names from a table, on first use",
    ("clients/memory/fragments.py", "importlib.import_module"): "torch, by name, where a tensor is wanted",
    ("appliance/cli/app.py", "importlib.import_module"): "commands from a table, when they are called",
    (
        "clients/trtllm/connector.py",
        "importlib.import_module",
    ): "a module of TensorRT-LLM, by two fixed names",
    ("tiers/codecs/base.py", "importlib.import_module"): "loops of kernels/, by fixed names, for numba",
    ("clients/vllm/names.py", "pickle"): "dumps alone: vLLM hashes these bytes, and nothing is loaded",
    ("tiers/codecs/kernels/vector_ir.py", "FunctionType"): "LLVM's type of a function, not Python's",
    (
        "tiers/gpu/device/launching.py",
        "importlib.import_module",
    ): "cupy, by that very name, where there is a GPU",
    (
        "tiers/gpu/device/libraries.py",
        "importlib.import_module",
    ): "cuda.pathfinder, by that very name, for doctor",
    (
        "tiers/gpu/decode/gds.py",
        "importlib.import_module",
    ): "kvikio, by that very name, where it is installed",
    (
        "tiers/gpu/device/topology.py",
        "importlib.import_module",
    ): "pynvml, by that very name, where it is installed",
}


def modules() -> list[Path]:
    """Return every module that a wheel of ours contains."""
    found = [path for folder in sorted(PACKAGE.iterdir()) if folder.is_dir() for path in folder.rglob("*.py")]
    return sorted({path.resolve() for path in [*found, *PACKAGE.glob("*.py")]})


def name_of(path: Path) -> str:
    root = (PACKAGE / "appliance").resolve().parent
    return str(path.relative_to(root))


def dotted(node: ast.expr) -> str:
    """Return `a.b.c` of such an expression, empty for others."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}".lstrip(".")
    return ""


def findings(tree: ast.AST) -> Iterator[str]:
    """Yield what in a module makes code or objects of bytes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.partition(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = {f"{(node.module or '').rpartition('.')[2]}.{alias.name}" for alias in node.names}
            if (node.module or "").partition(".")[0] in MODULES:
                yield node.module or ""
            yield from names & CALLS
        elif isinstance(node, ast.Name) and node.id in BUILTINS and isinstance(node.ctx, ast.Load):
            yield node.id
        elif isinstance(node, ast.Attribute):
            names_ = dotted(node).split(".")
            yield from {".".join(names_[-2:]), names_[-1]} & CALLS
        elif isinstance(node, ast.Call):
            yield from (
                f"{keyword.arg}=True"
                for keyword in node.keywords
                if keyword.arg in ("shell", "allow_pickle", "trust_remote_code")
                and not (isinstance(keyword.value, ast.Constant) and keyword.value.value is False)
            )


def test_no_module_makes_code_of_bytes() -> None:
    paths = modules()
    assert len(paths) > 150, "the package is looked for in the right place"
    found = {
        (name_of(path), what): path
        for path in paths
        for what in findings(ast.parse(path.read_text(encoding="utf-8"), str(path)))
    }
    assert sorted(found.keys() - ALLOWED.keys()) == []
    assert sorted(ALLOWED.keys() - found.keys()) == [], "an exception that nobody needs"


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import pickle as p",
        "from pickle import loads",
        "import multiprocessing, dill",
        "eval('1')",
        "run = exec",
        "__import__('os')",
        "import yaml; yaml.load(b'')",
        "from yaml import unsafe_load",
        "import torch; torch.load('f')",
        "from torch import load",
        "import numpy as np; np.load('f')",
        "import importlib; importlib.import_module('x')",
        "from importlib import import_module",
        "socket.recv_pyobj()",
        "types.FunctionType(code, {})",
        "subprocess.run('ls', shell=True)",
        "subprocess.run('ls', shell=is_shell)",
        "np.load('f', allow_pickle=1)",
        "os.system('ls')",
    ],
)
def test_the_search_finds(source: str) -> None:
    assert list(findings(ast.parse(source)))


@pytest.mark.parametrize(
    "source", ["yaml.safe_load(b'')", "re.compile('a')", "self.load()", "run(shell=False)"]
)
def test_the_search_leaves_alone(source: str) -> None:
    assert not list(findings(ast.parse(source)))


def is_loading_compiled_loops() -> bool:
    """Whether numba reads what it compiled before. It lies beside the source, or in the home of the daemon's
    user, as Python's own compiled modules do; whoever can write there can write our code."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename.endswith("numba/core/caching.py"):
            return True
        frame = frame.f_back
    return False


def test_a_working_daemon_unpickles_nothing(tmp_path: Path) -> None:
    """Python itself reports every class that an unpickler looks up."""
    seen: list[str] = []
    is_listening = True

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if is_listening and event == "pickle.find_class" and not is_loading_compiled_loops():
            seen.append(f"{arguments[0]}.{arguments[1]}")

    sys.addaudithook(hook)
    try:
        data = os.urandom(4 * 16_384)
        with DaemonThread(small_settings(tmp_path, nvme=True)) as served:
            with RawClient(served.daemon.service.facts.local_socket_path) as client:
                client.attach()
                client.put(client.register(), chain(4), data)
            served.wait(served.daemon.drain(60.0))
        with DaemonThread(small_settings(tmp_path, nvme=True)) as served:
            assert served.daemon.planner.statistics()["num_blocks"] == 4, "and reads back what it kept"
    finally:
        is_listening = False
    assert seen == []
