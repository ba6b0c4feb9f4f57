"""What an inference runtime installs: Client, AsyncClient, value objects, errors.

Depends on grpcio, protobuf and numpy; knows tensors by their pointer and never imports torch. Reading
order: words, namespace, keys · effects, base, puts, gets, leases (what is said, no I/O) · extents, shared,
staging (shared memory) · local, link, remote, aio_link, remote_aio (connections) · aio, sync (the face).
"""

from importlib import import_module
from typing import TYPE_CHECKING

from .breaker import Breaker
from .buffers import Pieces
from .errors import (
    DataLoss,
    DeadlineExceeded,
    InvalidRequest,
    KvtierError,
    NotFound,
    Overloaded,
    PermissionDenied,
    PreconditionFailed,
    ServerBug,
    Unavailable,
)
from .fragments import Fragment
from .guard import Guard
from .keys import prefix_hashes
from .namespace import Geometry, Namespace, NamespaceIdentity
from .opaque import opaque_geometry
from .options import Limits, Retry, Timeout
from .staging import StagingBuffer
from .sync import Client, Lease, Pin, Session
from .weights import checkpoint_digest, find_checkpoint
from .words import (
    GetReport,
    Lookup,
    Prefetch,
    PrefillSpeed,
    PutOutcome,
    PutReport,
    Retention,
    ServerInfo,
    Tier,
    Urgency,
)

if TYPE_CHECKING:
    from .aio import AsyncClient, AsyncLease, AsyncPin, AsyncSession

__all__ = [
    "AsyncClient",
    "AsyncLease",
    "AsyncPin",
    "AsyncSession",
    "Breaker",
    "Client",
    "DataLoss",
    "DeadlineExceeded",
    "Fragment",
    "Geometry",
    "GetReport",
    "Guard",
    "InvalidRequest",
    "KvtierError",
    "Lease",
    "Limits",
    "Lookup",
    "Namespace",
    "NamespaceIdentity",
    "NotFound",
    "Overloaded",
    "PermissionDenied",
    "Pieces",
    "Pin",
    "PreconditionFailed",
    "Prefetch",
    "PrefillSpeed",
    "PutOutcome",
    "PutReport",
    "Retention",
    "Retry",
    "ServerBug",
    "ServerInfo",
    "Session",
    "StagingBuffer",
    "Tier",
    "Timeout",
    "Unavailable",
    "Urgency",
    "checkpoint_digest",
    "find_checkpoint",
    "opaque_geometry",
    "prefix_hashes",
]

#: Imported on first use: asyncio is a tenth of what importing the clients costs, and few runtimes need it.
_ON_DEMAND = {
    "AsyncClient": ".aio",
    "AsyncLease": ".aio",
    "AsyncPin": ".aio",
    "AsyncSession": ".aio",
}


def __getattr__(name: str) -> object:
    """Import a name of the asyncio client on first use."""
    if name in _ON_DEMAND:
        return getattr(import_module(_ON_DEMAND[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
