"""What an inference runtime installs: Client, AsyncClient, value objects, errors.

Depends on grpcio, protobuf and numpy; takes tensors by their pointer and never imports torch. A folder
imports only what stands below it (pyproject.toml holds that):

    vllm_tier, testing                            vLLM's own offloading; a fake daemon for tests of users
    vllm transformers sglang lmcache llamacpp trtllm fake   one connector per runtime; the fake daemon
    connector                                     what the connectors share
    aio, sync                                     AsyncClient; Client, generated from it
    links                                         connections: local channel, gRPC
    operations                                    what each call says, as generators without I/O
    memory                                        shared memory, staging, buffers
    values                                        namespaces, hashes, reports, checks of arguments

The modules at the top (errors, options, weights, direct_cuda, testing) have names that users import.
"""

from typing import TYPE_CHECKING

from ..lazy import on_demand
from ..v1.types import Geometry, NamespaceIdentity, PutOutcome, Tier, Urgency
from .connector.breaker import Breaker
from .connector.guard import Guard
from .connector.opaque import opaque_geometry
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
from .memory.buffers import Pieces
from .memory.fragments import Fragment
from .memory.staging import StagingBuffer
from .options import Limits, Retry, Timeout
from .sync import Client, Lease, Pin, Session
from .values.keys import prefix_hashes
from .values.namespace import Namespace
from .values.types import (
    ExpectedBlocks,
    GetReport,
    HostRank,
    Lookup,
    Prefetch,
    PrefillSpeed,
    PutReport,
    Rank,
    Retention,
    ServerInfo,
)
from .weights import checkpoint_digest, find_checkpoint

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
    "ExpectedBlocks",
    "Fragment",
    "Geometry",
    "GetReport",
    "Guard",
    "HostRank",
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
    "Rank",
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
__getattr__ = on_demand(__name__, {".aio": "AsyncClient AsyncLease AsyncPin AsyncSession"})
