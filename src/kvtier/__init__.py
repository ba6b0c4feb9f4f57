"""kvtier keeps the KV cache of language models in tiers, and knows what it keeps.

Every folder at the top of the repository is a subpackage:

    appliance/  the daemon        tiers/    where bytes live and how they move
    policies/   what moves when   clients/  what an inference runtime imports
    proto/kvtier/v1/ (imported as kvtier.v1)  the wire contract

`src/kvtier/` holds this file and links to these folders, so that installers and type checkers find them
under one polite name. The repository root itself is not a package: a clone in a folder named `kvtier` would
then shadow an installed one for every script beside it (docs/decisions/0001-top-level-folders.md).
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .clients.aio import AsyncClient
    from .clients.errors import KvtierError
    from .clients.sync import Client

__all__ = ["AsyncClient", "Client", "KvtierError"]
__version__ = "0.1.0"

_HOMES = {
    "AsyncClient": ".clients.aio",
    "Client": ".clients.sync",
    "KvtierError": ".clients.errors",
}


def __getattr__(name: str) -> object:
    """Import a public name on first use, so that `import kvtier` stays cheap."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
