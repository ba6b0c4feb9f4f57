"""Every call of the CUDA driver and of cupy in the product, held against cuda.h of CUDA 12.8 and 13.0 and
against the sources of cupy 13.6 and 14.2 (signatures.json, made by read_signatures.py). Needs no GPU."""

import ast
import ctypes
import json
from collections.abc import Iterator
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import kvtier
from kvtier.v1 import cuda

from .read_signatures import TABLE

SIGNATURES: dict[str, Any] = json.loads(TABLE.read_text())
PACKAGE = Path(kvtier.__file__).parent
#: What a parameter of cuda.h may be in ctypes. Columns of a batch are passed as plain addresses.
KINDS: dict[str, tuple[Any, ...]] = {
    "int": (c_int,),
    "unsigned int": (c_uint,),
    "size_t": (c_size_t,),
    "void *": (c_void_p,),
    "char *": (c_char_p,),
    "int *": (POINTER(c_int),),
    "size_t *": (POINTER(c_size_t), c_void_p),
    "CUdevice": (c_int,),
    "CUdevice *": (POINTER(c_int),),
    "CUdeviceptr": (c_uint64,),
    "CUdeviceptr *": (POINTER(c_uint64), c_void_p),
    "CUuuid *": (POINTER(cuda.Uuid),),
    "CUipcMemHandle": (cuda.IpcHandle,),
    "CUipcMemHandle *": (POINTER(cuda.IpcHandle),),
    "CUipcEventHandle": (cuda.IpcHandle,),
    "CUipcEventHandle *": (POINTER(cuda.IpcHandle),),
    "CUmemcpyAttributes *": (POINTER(cuda.BatchAttributes),),
    **dict.fromkeys(("CUcontext", "CUstream", "CUevent"), (c_void_p,)),
    **{f"{name} *": (POINTER(c_void_p),) for name in ("CUcontext", "CUstream", "CUevent")},
}
#: Functions of ours that take the name of a call of the driver, and at which position.
NAMED = {"check": 0, "call": 0, "_made": 1, "_give_back": 0}
#: The objects of cupy that the product keeps, by the variable: what the table calls them.
CUPY_OBJECTS = {"cupy": "", "module": "RawModule"}
CUPY_MODULES = {"tiers/gpu/device/launching.py"}
MAY_HOLD_THE_LOCK: set[str] = set()


@cache
def sources() -> dict[str, ast.Module]:
    """Return every module of the product, by its path."""
    files = [path for folder in sorted(PACKAGE.iterdir()) if folder.is_dir() for path in folder.rglob("*.py")]
    ours = [path for path in files if "_pb2" not in path.name]
    return {str(path.relative_to(PACKAGE)): ast.parse(path.read_text()) for path in ours}


def calls_in(tree: ast.AST) -> Iterator[ast.Call]:
    yield from (node for node in ast.walk(tree) if isinstance(node, ast.Call))


def is_driver_call(name: object) -> bool:
    return isinstance(name, str) and len(name) > 3 and name.startswith("cu") and name[2].isupper()


def driver_calls(tree: ast.AST) -> Iterator[tuple[str, int | None]]:
    """Yield the calls of the driver in a module, and how many arguments each is given; None: unknown."""
    for call in calls_in(tree):
        function, arguments = call.func, call.args
        name = getattr(function, "attr", getattr(function, "id", ""))
        is_starred = any(isinstance(argument, ast.Starred) for argument in arguments)
        if is_driver_call(name):
            yield name, None if is_starred else len(arguments)
        elif name in NAMED and len(arguments) > NAMED[name]:
            named = arguments[NAMED[name]]
            if isinstance(named, ast.Constant) and is_driver_call(named.value):
                yield str(named.value), None if is_starred else len(arguments) - 1


def cupy_calls(tree: ast.AST) -> Iterator[tuple[str, int, tuple[str, ...]]]:
    """Yield the calls of cupy in a module: their name in the table, positional arguments, keywords."""
    for call in calls_in(tree):
        keywords = tuple(keyword.arg or "**" for keyword in call.keywords)
        function = call.func
        if isinstance(function, ast.Subscript) and getattr(function.value, "id", "") == "kernels":
            yield "RawKernel.__call__", len(call.args), keywords
        elif isinstance(function, ast.Attribute):
            names = ast.unparse(function).split(".")
            if names[0] in CUPY_OBJECTS:
                yield (
                    ".".join(filter(None, [CUPY_OBJECTS[names[0]], *names[1:]])),
                    len(call.args),
                    keywords,
                )


def cupy_attributes(tree: ast.AST) -> Iterator[str]:
    """Yield what is taken from cupy by name."""
    outer = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and id(node) not in outer:
            first, _, rest = ast.unparse(node).partition(".")
            if first == "cupy":
                yield rest


@pytest.mark.parametrize("version", SIGNATURES["cuda"])
def test_prototypes_are_those_of_cuda_h(version: str) -> None:
    declared = SIGNATURES["cuda"][version]["calls"]
    assert set(declared) == set(cuda.PROTOTYPES)
    for name, parameters in cuda.PROTOTYPES.items():
        wanted = [KINDS[kind] for kind in declared[name]]
        assert len(parameters) == len(wanted), name
        for number, (kind, kinds) in enumerate(zip(parameters, wanted, strict=True)):
            assert kind in kinds, f"{name}, parameter {number}"


@pytest.mark.parametrize("version", SIGNATURES["cuda"])
def test_structures_and_constants_are_those_of_cuda_h(version: str) -> None:
    table = SIGNATURES["cuda"][version]
    sizes = {"CUmemLocationType": 4, "CUmemcpySrcAccessOrder": 4, "int": 4, "unsigned int": 4}
    sizes |= {"char[16]": 16, "char[CU_IPC_HANDLE_SIZE]": 64}
    sizes["CUmemLocation"] = sum(sizes[kind] for kind in table["structures"]["CUmemLocation"])
    ours = {
        "CUmemcpyAttributes": cuda.BatchAttributes,
        "CUmemLocation": cuda.Location,
        "CUipcMemHandle": cuda.IpcHandle,
        "CUipcEventHandle": cuda.IpcHandle,
        "CUuuid": cuda.Uuid,
    }
    for name, structure in ours.items():
        fields = [ctypes.sizeof(field[1]) for field in structure._fields_]
        assert fields == [sizes[kind] for kind in table["structures"][name]], name
    for name, value in table["constants"].items():
        assert getattr(cuda, name) == value, name


def test_every_call_of_the_driver_is_in_the_table() -> None:
    found = [(path, *call) for path, tree in sources().items() for call in driver_calls(tree)]
    assert {name for _, name, _ in found} | set(cuda.OPTIONAL) <= set(cuda.PROTOTYPES)
    for path, name, num_arguments in found:
        if num_arguments is not None:
            assert num_arguments == len(cuda.PROTOTYPES[name]), f"{path}: {name}"
    unused = set(cuda.PROTOTYPES) - {name for _, name, _ in found}
    assert not unused, "a prototype without a call"


def test_libraries_are_loaded_such_that_calls_release_the_lock() -> None:
    """ctypes.CDLL does, PyDLL does not; and nothing of CUDA is loaded elsewhere."""
    for path, tree in sources().items():
        names = [ast.unparse(call.func) for call in calls_in(tree)]
        assert not [name for name in names if name.endswith("PyDLL")], path
        if any(isinstance(node, ast.Constant) and node.value == cuda.LIBRARY for node in ast.walk(tree)):
            assert path == "v1/cuda.py"


@pytest.mark.parametrize("version", SIGNATURES["cupy"])
def test_every_call_of_cupy_is_in_the_table(version: str) -> None:
    table = SIGNATURES["cupy"][version]
    used = {path for path, tree in sources().items() if set(imported(tree)) & {"cupy", "cupy_backends"}}
    assert used == CUPY_MODULES, "cupy is loaded elsewhere; let this test look there, too"
    for path in CUPY_MODULES:
        called = list(cupy_calls(sources()[path]))
        assert {name for name, _, _ in called} >= {"RawModule", "RawModule.compile", "RawKernel.__call__"}
        for name, num_positional, keywords in called:
            assert name in table["calls"], f"{path}: cupy's {name} was never looked up"
            signature = table["calls"][name]
            positional = [*signature["parameters"], "*"]
            assert num_positional <= positional.index("*"), f"{path}: {name}"
            assert set(keywords) <= set(signature["parameters"]), f"{path}: {name}"
            assert signature["nogil"] or name in MAY_HOLD_THE_LOCK, (
                f"{path}: {name} blocks with the lock held"
            )
        for name in cupy_attributes(sources()[path]):
            assert name in table["calls"] or name in table["exceptions"], f"{path}: cupy.{name}"


def imported(tree: ast.AST) -> Iterator[str]:
    """Yield the first names of what a module imports."""
    for node in ast.walk(tree):
        names: list[object] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            names = [ast.literal_eval(node.args[0]) if isinstance(node.args[0], ast.Constant) else ""]
        yield from (str(name).partition(".")[0] for name in names)


def test_an_unknown_call_is_found() -> None:
    """The walk sees what it is there for."""
    tree = ast.parse(
        "cuda.check('cuMemMap', 1)\nself._made(out, 'cuEventCreate')\nlibrary().cuFoo(1, 2)\n"
        "cupy.cuda.ExternalStream(p)\nkernels[n](grid, block, args, streams=s)\nmodule.load()"
    )
    assert list(driver_calls(tree)) == [("cuMemMap", 1), ("cuEventCreate", 1), ("cuFoo", 2)]
    assert list(cupy_calls(tree)) == [
        ("cuda.ExternalStream", 1, ()),
        ("RawKernel.__call__", 3, ("streams",)),
        ("RawModule.load", 0, ()),
    ]
    assert list(cupy_attributes(tree)) == ["cuda.ExternalStream"]


def test_cupy_itself_where_it_is_installed() -> None:
    """It can be imported without a GPU; a module is not compiled before it is asked to be."""
    cupy: Any = pytest.importorskip("cupy")
    module = cupy.RawModule(code='extern "C" __global__ void nothing() {}')
    assert callable(module.compile)
    assert callable(module.get_function)
    for name, base in SIGNATURES["cupy"][max(SIGNATURES["cupy"])]["exceptions"].items():
        owner = cupy
        for part in name.split("."):
            owner = getattr(owner, part)
        assert issubclass(owner, getattr(__builtins__, base, Exception)), name
