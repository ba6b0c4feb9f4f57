"""kvtier as the storage (L3) below SGLang's HiCache: pages that leave host memory are kept, shared and
found again.

    python -m sglang.launch_server --enable-hierarchical-cache --hicache-storage-backend dynamic \\
      --hicache-storage-backend-extra-config '{"backend_name": "kvtier", "interface_v1": 1,
        "module_path": "kvtier.clients.sglang", "class_name": "KvtierStorage",
        "kvtier": {"weights": "/models/llama"}}'

Reading order: identity (what may be shared) · pages (where a page's bytes are) · backend (SGLang's
interface). Only the last imports sglang, and nothing in kvtier.clients imports this package.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .backend import KvtierStorage

__all__ = ["KvtierStorage"]


def __getattr__(name: str) -> Any:
    """Import the backend when SGLang asks for it."""
    if name != "KvtierStorage":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .backend import KvtierStorage

    return KvtierStorage
