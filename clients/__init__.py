"""What an inference runtime installs: Client, AsyncClient, value objects, errors.

Depends on grpcio, protobuf and numpy; knows tensors by their pointer and never imports torch. Reading
order: words, namespace, keys · effects, base, puts, gets, leases (what is said, no I/O) · extents, shared,
staging (shared memory) · local, link, remote, aio_link, remote_aio (connections) · sync, aio (the face).
"""

from .aio import AsyncClient
from .aio_handles import AsyncLease, AsyncPin, AsyncSession
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
from .handles import Lease, Pin, Session
from .keys import prefix_hashes
from .namespace import Geometry, Namespace, NamespaceIdentity
from .opaque import opaque_geometry
from .options import Limits, Retry, Timeout
from .staging import StagingBuffer
from .sync import Client
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
