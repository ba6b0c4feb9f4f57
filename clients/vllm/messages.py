"""What the connector's two sides tell each other through vLLM.

vLLM's MultiConnector passes one child's handshake on to all of them, and NixlConnector ends the engine when
that is another's. So as a child of it the connector has none, and what the workers' namespaces are travels
with their reports of the first step, which is run for that before any request. Not so otherwise: what cannot
be served is then said before the engine is ready.
"""

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from ...v1.types import NamespaceIdentity
from .plan import Acks, StepPlan


@dataclass
class KvtierMetadata(KVConnectorMetadata):
    """A step's plan on its way to the workers. `asks`: for their handshakes."""

    plan: StepPlan
    asks: bool = False


@dataclass
class KvtierWorkerMetadata(KVConnectorWorkerMetadata):
    """Saves that are over, on their way to the scheduler, and handshakes by rank where asked for."""

    acks: Acks
    handshakes: "dict[int, KvtierHandshake]" = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "KvtierWorkerMetadata":
        """Add what another rank has reported; return self."""
        assert isinstance(other, KvtierWorkerMetadata)
        self.acks.add(other.acks)
        self.handshakes |= other.handshakes
        return self


@dataclass
class KvtierHandshake(KVConnectorHandshakeMetadata):
    """What a worker's namespaces are; empty when it cannot serve."""

    identities: list[NamespaceIdentity]
    why_not: str = ""
