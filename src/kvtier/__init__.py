"""kvtier keeps the KV cache of language models in tiers, and knows what it keeps.

Every folder at the top of the repository is a subpackage:

    appliance/  the daemon        tiers/    where bytes live and how they move
    policies/   what moves when   clients/  what an inference runtime imports
    proto/kvtier/v1/ (imported as kvtier.v1)  the wire contract

`src/kvtier/` holds a few small files and links to these folders, so that installers and type checkers find them
under one polite name. The repository root itself is not a package: a clone in a folder named `kvtier` would
then shadow an installed one for every script beside it (docs/decisions/0001-top-level-folders.md).
"""

from typing import TYPE_CHECKING

from .lazy import on_demand

if TYPE_CHECKING:
    from .clients.aio import AsyncClient
    from .clients.errors import KvtierError
    from .clients.sync import Client

__all__ = ["AsyncClient", "Client", "KvtierError"]
__version__ = "0.1.0"

#: So that `import kvtier` stays cheap.
__getattr__ = on_demand(
    __name__,
    {".clients.aio": "AsyncClient", ".clients.errors": "KvtierError", ".clients.sync": "Client"},
)
