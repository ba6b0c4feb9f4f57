"""Writes signatures.json: what cuda.h and cupy's sources say of the calls that the product makes.

    python -m tests.tiers.gpu.read_signatures --cuda 12.8=cuda.h --cuda 13.0=cuda.h --cupy 14.2.0=FOLDER ...

cuda.h is in the wheels `nvidia-cuda-runtime-cu12` and `nvidia-cuda-runtime`, cupy's sources in its source
distribution. The table is committed; this runs again when a call or a version is added."""

import argparse
import json
import re
from pathlib import Path
from typing import Any

from kvtier.v1.cuda import PROTOTYPES

TABLE = Path(__file__).with_name("signatures.json")
STRUCTURES = ("CUmemcpyAttributes", "CUmemLocation", "CUipcMemHandle", "CUipcEventHandle", "CUuuid")
CONSTANTS = {
    "STREAM_NON_BLOCKING": "CU_STREAM_NON_BLOCKING",
    "EVENT_DISABLE_TIMING": "CU_EVENT_DISABLE_TIMING",
    "EVENT_INTERPROCESS": "CU_EVENT_INTERPROCESS",
    "HOST_REGISTER_PORTABLE": "CU_MEMHOSTREGISTER_PORTABLE",
    "HOST_REGISTER_READ_ONLY": "CU_MEMHOSTREGISTER_READ_ONLY",
    "IPC_LAZY_ENABLE_PEER_ACCESS": "CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS",
    "SOURCE_IN_STREAM_ORDER": "CU_MEMCPY_SRC_ACCESS_ORDER_STREAM",
    "NOT_READY": "CUDA_ERROR_NOT_READY",
    "INVALID_VALUE": "CUDA_ERROR_INVALID_VALUE",
    "NOT_SUPPORTED": "CUDA_ERROR_NOT_SUPPORTED",
}
#: What of cupy is called: (file, class or empty, function), and in which function it blocks.
CUPY = {
    "RawModule": ("cupy/_core/raw.pyx", "RawModule", "__init__", ""),
    "RawModule.compile": ("cupy/_core/raw.pyx", "RawModule", "compile", "nvrtc.compileProgram"),
    "RawModule.get_function": ("cupy/_core/raw.pyx", "RawModule", "get_function", "nvrtc.compileProgram"),
    "RawKernel.__call__": ("cupy/cuda/function.pyx", "Function", "__call__", "driver.launchKernel"),
}
BLOCKS_IN = {
    "nvrtc.compileProgram": ("cupy_backends/cuda/libs/nvrtc.pyx", "compileProgram"),
    "driver.launchKernel": ("cupy_backends/cuda/api/driver.pyx", "launchKernel"),
}
EXCEPTIONS = {
    "cuda.compiler.CompileException": ("cupy/cuda/compiler.py", "CompileException"),
    "cuda.driver.CUDADriverError": ("cupy_backends/cuda/api/driver.pyx", "CUDADriverError"),
    "cuda.runtime.CUDARuntimeError": ("cupy_backends/cuda/api/runtime.pyx", "CUDARuntimeError"),
}
_DECLARATION = re.compile(r"CUresult CUDAAPI (\w+)\(([^;]*)\);")
_MACRO = re.compile(r"^\s*#define (cu\w+)\s+(?:__CUDA_API_PT[SD][SZ]\()?(cu\w+)\)?\s*$", re.M)


def cuda_calls(header: str) -> dict[str, list[str]]:
    """Return the types of the parameters of each library symbol in PROTOTYPES. Macros rename: what cuda.h
    declares as cuMemAlloc is the symbol cuMemAlloc_v2."""
    renamed = {name: symbol for name, symbol in _MACRO.findall(header) if name != symbol}
    found: dict[str, list[str]] = {}
    for match in _DECLARATION.finditer(header):
        name = str(match[1])
        is_after_undef = f"#undef {name}\n" in header[: match.start()]
        symbol = name if is_after_undef else renamed.get(name, name)
        found.setdefault(symbol, [_type_of(one) for one in match[2].split(",")])
    return {name: found[name] for name in PROTOTYPES if name in found}


def _type_of(parameter: str) -> str:
    """Return `CUdeviceptr *` of `CUdeviceptr *dptr`."""
    words = re.findall(r"\w+|\*", parameter.replace("const ", ""))
    return " ".join(words[:-1])


def cuda_structure(header: str, name: str) -> list[str]:
    """Return the types of the fields of a structure, `char[64]` for an array."""
    match = re.search(rf"typedef struct {name}_st \{{(.*?)\}}", header, re.S)
    assert match is not None, name
    body = re.sub(r"/\*.*?\*/", "", match[1], flags=re.S)
    fields = re.findall(r"([\w ]+?)\s+\w+(\[\w+\])?;", body)
    return [kind.strip() + size for kind, size in fields]


def cuda_constant(header: str, name: str) -> int:
    """Return the value of an enumerator or a macro."""
    match = re.search(rf"{name}\s*=?\s*(0x[0-9a-fA-F]+|\d+)", header)
    assert match is not None, name
    return int(match[1], 0)


def parameters_of(source: str, owner: str, function: str) -> list[str]:
    """Return the names of the parameters of a Cython function, keyword-only ones behind `*`."""
    start = source.index(f"class {owner}:") if owner else 0
    match = re.search(rf"def {function}\((.*?)\):", source[start:], re.S)
    assert match is not None, function
    names = []
    for part in re.sub(r"\s+", " ", match[1]).split(","):
        word = part.partition("=")[0].split()
        if word and word[-1] != "self":
            names.append(word[-1])
    return names


def releases_the_lock(source: str, function: str) -> bool:
    """Whether a function of cupy's makes its call without the interpreter's lock."""
    match = re.search(rf"^cpdef [^\n]*{function}\(.*?(?=^cpdef |^cdef |\Z)", source, re.S | re.M)
    assert match is not None, function
    return "with nogil:" in match[0]


def cupy_calls(folder: Path) -> dict[str, Any]:
    """Return what the table says of one version of cupy."""
    nogil = {
        name: releases_the_lock((folder / file).read_text(), function)
        for name, (file, function) in BLOCKS_IN.items()
    }
    calls = {
        name: {
            "parameters": parameters_of((folder / file).read_text(), owner, function),
            "nogil": nogil.get(blocks_in, True),
        }
        for name, (file, owner, function, blocks_in) in CUPY.items()
    }
    exceptions = {}
    for name, (file, owner) in EXCEPTIONS.items():
        match = re.search(rf"class {owner}\((\w+)\)", (folder / file).read_text())
        assert match is not None, name
        exceptions[name] = match[1]
    return {"calls": calls, "exceptions": exceptions}


def pairs(values: list[str]) -> dict[str, Path]:
    """Return VERSION=PATH arguments as a dict."""
    split = (value.partition("=") for value in values)
    return {version: Path(path) for version, _, path in split}


def main() -> None:
    """Write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cuda", action="append", default=[], metavar="VERSION=FILE")
    parser.add_argument("--cupy", action="append", default=[], metavar="VERSION=FOLDER")
    options = parser.parse_args()
    table: dict[str, Any] = {"cuda": {}, "cupy": {}}
    for version, path in pairs(options.cuda).items():
        header = path.read_text()
        table["cuda"][version] = {
            "calls": cuda_calls(header),
            "structures": {name: cuda_structure(header, name) for name in STRUCTURES},
            "constants": {ours: cuda_constant(header, name) for ours, name in CONSTANTS.items()},
        }
    for version, path in pairs(options.cupy).items():
        table["cupy"][version] = cupy_calls(path)
    TABLE.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
