"""kvtier as the storage (L3) below SGLang's HiCache: pages that leave host memory are kept, shared and
found again.

    python -m sglang.launch_server --enable-hierarchical-cache --hicache-storage-backend dynamic \\
      --hicache-storage-backend-extra-config '{"backend_name": "kvtier", "interface_v1": 1,
        "module_path": "kvtier.clients.sglang", "class_name": "KvtierStorage",
        "kvtier": {"weights": "/models/llama"}}'

Beside it, without a host pool of SGLang's: its direct linker, `--unified-cache-external-linker-backend
dynamic` (linker.py).

Reading order: identity (what may be shared) · pages (where a page's bytes are in host memory) · backend
(SGLang's storage) · layered (where they are in device pools) · delivery (threads and copies) · linker.
backend and linker import sglang, and nothing in kvtier.clients imports this package.
"""

from typing import TYPE_CHECKING

from ...lazy import on_demand

if TYPE_CHECKING:
    from .backend import KvtierStorage
    from .linker import KvtierLinker

__all__ = ["KvtierLinker", "KvtierStorage"]

__getattr__ = on_demand(__name__, {".backend": "KvtierStorage", ".linker": "KvtierLinker"})
