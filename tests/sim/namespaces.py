"""Namespaces come and go: in half of the seeds more of them are registered than the daemon may know.

Those that nothing is stored in are forgotten then, also under clients that still have their ids. Such a
client is refused and registers again, as the real one does.

Drawn from a source of randomness of their own, so that a seed without is the same seed as ever.
"""

from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING

from kvtier.appliance.core.results import NamespaceResult, Result
from kvtier.tiers.block import NamespaceIdentity

from .config import Config

if TYPE_CHECKING:
    from .clients import Crowd

CHURN_FRACTION = 0.5
RATE = 0.5  # registrations per operation


class Namespaces:
    """Registers other namespaces than those that clients use, and theirs anew when they were forgotten."""

    def __init__(self, seed: int, config: Config) -> None:
        self._rng = Random(f"namespaces of {seed}")
        self._config = config
        self.is_active = self._rng.random() < CHURN_FRACTION
        self._num_others = 0
        if self.is_active:
            limit = len(config.geometries) + 1
            config.options = replace(config.options, max_namespaces=limit)

    def apply(self, crowd: "Crowd") -> None:
        """Before an operation: register another namespace, sometimes."""
        if not self.is_active or self._rng.random() >= RATE:
            return
        self._num_others += 1
        digest = b"other" + self._num_others.to_bytes(11)
        geometry = self._rng.choice(self._config.geometries)
        domain = f"domain-{self._rng.randrange(self._config.num_domains)}"
        crowd.register(NamespaceIdentity(digest, geometry, domain=domain), lambda result: None)
        self.renew(crowd)

    def renew(self, crowd: "Crowd") -> None:
        """Register what clients use and the daemon forgot."""
        namespaces = crowd.daemon.planner.catalog.namespaces
        for index, identity in enumerate(crowd.identities):
            if crowd.namespace_ids[index] not in namespaces:
                crowd.world.counts["namespace_forgotten"] += 1

                def renewed(result: Result, index: int = index) -> None:
                    if isinstance(result, NamespaceResult):
                        crowd.namespace_ids[index] = result.namespace_id

                crowd.register(identity, renewed)
