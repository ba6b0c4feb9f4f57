"""Lets SGLang be imported without a GPU: a `triton` that does nothing, in place of 900 MB that would not
run here.

Only kernels are affected. The storage interface, the factory and the host pools are plain Python and torch.
"""

import importlib.machinery
import sys
import types
from typing import Any
from unittest.mock import MagicMock

_SUBMODULES = (
    "language",
    "language.extra",
    "language.extra.libdevice",
    "runtime",
    "runtime.jit",
    "runtime.cache",
    "runtime.driver",
    "compiler",
    "compiler.compiler",
    "backends",
    "backends.compiler",
    "testing",
)


def install() -> None:
    """Put the stub where `import triton` finds it. Idempotent; does nothing where triton is installed."""
    if "triton" in sys.modules or importlib.machinery.PathFinder.find_spec("triton"):
        return
    root = _module("triton")
    root.jit = _jit  # type: ignore[attr-defined]
    root.__version__ = "3.8.0"  # type: ignore[attr-defined]
    for name in _SUBMODULES:
        parent, _, child = f"triton.{name}".rpartition(".")
        setattr(sys.modules[parent], child, _module(f"triton.{name}"))


def install_tree_stubs() -> None:
    """Let the direct linker's modules be imported without the cache tree, which wants a GPU's packages.

    The linker's interface, its wrapper on the tree's side, the factory and the views of device pools are
    SGLang's own; of the tree they name these types only.
    """
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

    for name in ("base_prefix_cache", "radix_cache", "unified_cache.components"):
        stub = _module(f"sglang.srt.mem_cache.{name}")
    stub.ComponentType = ComponentType  # type: ignore[attr-defined]


def _jit(function: Any = None, **_: Any) -> Any:
    return function if function else lambda decorated: decorated


def _module(name: str) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    module.__path__ = []

    def lookup(attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return MagicMock(name=f"{name}.{attribute}")

    module.__getattr__ = lookup  # type: ignore[method-assign]
    sys.modules[name] = module
    return module
