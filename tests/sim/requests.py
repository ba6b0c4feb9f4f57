"""What all requests of a client have: who asks, and for which chain."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from kvtier.tiers.block import NamespaceIdentity, Urgency

from .mover import Staging

if TYPE_CHECKING:
    from .clients import Crowd

URGENCIES = (Urgency.DECODING, Urgency.PREFILL, Urgency.QUEUED, Urgency.WAITING, Urgency.IDLE)


class Client:
    """One client of one life of the daemon."""

    def __init__(self, number: int, domain: str, is_local: bool) -> None:
        self.number = number
        self.domain = domain
        self.is_local = is_local
        self.is_alive = True
        self.staging = Staging()
        self.next_offset = 0
        self.leases: list[int] = []


class Chain(NamedTuple):
    """Blocks of a namespace, each the parent of the next."""

    namespace_id: int
    identity: NamespaceIdentity
    hashes: Sequence[bytes]


class Request:
    """One request of one client of a life of the daemon."""

    def __init__(self, crowd: "Crowd", client: Client, chain: Chain) -> None:
        self.crowd = crowd
        self.world = crowd.world
        self.daemon = crowd.daemon
        self.client = client
        self.namespace_id, self.identity, self.hashes = chain
        self.request_id = crowd.request_id()
