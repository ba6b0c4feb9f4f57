"""Tenants are erased in the middle of everything: in two seeds of five a key is destroyed now and then.

What stood readable in any tier when that began must not be found once the planner said that it is done, nor
after a crash in between: the key was gone before the planner heard of it. What is put anew may be found.

Drawn from a source of randomness of their own, so that a seed without is the same seed as ever.
"""

from random import Random

from kvtier.appliance.core import events as ev
from kvtier.appliance.core.results import CountResult, Result
from kvtier.tiers.block import tenant_of

from .cold import VirtualColdStore
from .config import Config
from .daemon import Daemon
from .oracle import Contents
from .world import World

ERASING_FRACTION = 0.4
MAX_ERASED = 3


class Erasing:
    """What an administrator destroys in one world."""

    def __init__(self, world: World, config: Config, contents: Contents, cold: VirtualColdStore) -> None:
        self._world = world
        self._config = config
        self._contents = contents
        self._cold = cold
        self._rng = Random(f"erasing of {world.seed}")
        self._doomed: set[int] = set()  # while the planner is at it
        self._is_under_way = False
        self.num_left = 0
        if self._rng.random() < ERASING_FRACTION:
            self.num_left = self._rng.randint(1, MAX_ERASED)

    def is_due(self, num_operations_left: int) -> bool:
        """Whether somebody is erased before the next operation. Never two at once: who comes second waits in
        appliance/admin/tenant_admin.py."""
        if self._is_under_way:
            return False
        return self.num_left > 0 and self._rng.random() * (num_operations_left + 1) < self.num_left

    def apply(self, daemon: Daemon) -> None:
        """Destroy a tenant's key, then tell the planner, as appliance/admin/tenant_admin.py does."""
        self.num_left -= 1
        self._is_under_way = True
        tenant = tenant_of(f"domain-{self._rng.randrange(self._config.num_domains)}")
        world = self._world
        world.counts["tenant_erased"] += 1
        world.note("!erase", tenant)
        daemon.oracle.is_lossy = True  # blocks vanish, whoever counts on them
        doomed = self._cold.erase(tenant)
        namespaces = daemon.planner.catalog.namespaces.values()
        digests = {one.identity.digest for one in namespaces if tenant_of(one.identity.domain) == tenant}
        doomed |= {token for token in daemon.unfound if self._contents.key_of(token)[0] in digests}
        for namespace in namespaces:
            if namespace.identity.digest in digests:
                for memory in daemon.memories.values():
                    doomed |= memory.tokens_of(namespace.id)
        self._doomed |= doomed
        self._contents.doomed |= doomed

        def answered(result: Result) -> None:
            assert isinstance(result, CountResult)
            self._contents.bury(doomed)
            self._doomed -= doomed
            self._cold.admit(tenant)
            self._is_under_way = False

        daemon.step(ev.TenantErased(daemon.call(0, answered, world.now + 60), tenant))

    def crashed(self) -> set[int]:
        """The key was gone before memory: whatever the planner had not come to is gone, too. Returns that: a
        later daemon takes nothing of it over (appliance/persisted/namespace_book.py)."""
        doomed, self._doomed = self._doomed, set()
        self._contents.bury(doomed)
        self._is_under_way = False
        return doomed
