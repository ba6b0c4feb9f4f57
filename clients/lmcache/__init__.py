"""kvtier below LMCache: for deployments of LMCache that want a tier that is bounded, checksummed and
survives restarts. LMCache finds both classes here by module and class name, and imports nothing else.

    KvtierConnectorAdapter    remote storage plug-in of the in-process engine (remote.py)
    KvtierL2Adapter           plug-in L2 adapter of the multi-process server (l2.py)

Both put LMCache's chunks under LMCache's own keys into kvtier (chunks.py); neither ever raises into LMCache
once it is made. See docs/integrations/lmcache.md.

lmcache is imported when one of the classes is asked for, not with this package.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .l2 import KvtierL2Adapter, KvtierL2AdapterConfig
    from .remote import KvtierConnector, KvtierConnectorAdapter

_HOMES = {
    "KvtierConnector": "remote",
    "KvtierConnectorAdapter": "remote",
    "KvtierL2Adapter": "l2",
    "KvtierL2AdapterConfig": "l2",
}
__all__ = ["KvtierConnector", "KvtierConnectorAdapter", "KvtierL2Adapter", "KvtierL2AdapterConfig"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
