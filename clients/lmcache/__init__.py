"""kvtier below LMCache: for deployments of LMCache that want a tier that is bounded, checksummed and
survives restarts. LMCache finds both classes here by module and class name, and imports nothing else.

    KvtierConnectorAdapter    remote storage plug-in of the in-process engine (remote.py)
    KvtierL2Adapter           plug-in L2 adapter of the multi-process server (l2.py)

Both put LMCache's chunks under LMCache's own keys into kvtier (chunks.py); neither ever raises into LMCache
once it is made. See docs/integrations/lmcache.md.

lmcache is imported when one of the classes is asked for, not with this package.
"""

from typing import TYPE_CHECKING

from ...lazy import on_demand

if TYPE_CHECKING:
    from .l2 import KvtierL2Adapter, KvtierL2AdapterConfig
    from .remote import KvtierConnector, KvtierConnectorAdapter

__all__ = ["KvtierConnector", "KvtierConnectorAdapter", "KvtierL2Adapter", "KvtierL2AdapterConfig"]

__getattr__ = on_demand(
    __name__,
    {
        ".l2": "KvtierL2Adapter KvtierL2AdapterConfig",
        ".remote": "KvtierConnector KvtierConnectorAdapter",
    },
)
