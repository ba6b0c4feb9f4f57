"""CoreState: what all parts of the planner work on. One object, given to each of them.

Options, policies in force and the time are read from here and nowhere else, so that a change of policy is one
assignment. Writers: `catalog` rows by requests and recovery, the state columns by `transitions` only,
`options`, `policies` and `choice` by changes.py, `now` by planner.py, `offline` by TierLost, `pin_floors` by
pins.py, `writers` by put_job.py, `erased_tenants` by erasing.py."""

from collections.abc import Callable, Mapping
from typing import Any, cast

from ....policies.base import Future
from ....policies.costs import CostModel
from ....policies.registry import PolicyChoice, PolicySet, build
from ....tiers.base import MemoryRoom, Room
from ....tiers.block import Tier, tenant_of
from ....tiers.cold.log import SegmentLog
from ....tiers.ladder import STANDARD, Ladder
from ..options import PlannerOptions
from .catalog import Catalog, NamespaceEntry
from .outbox import Outbox
from .policy_facts import PolicyFacts
from .policy_listeners import PolicyListeners
from .story import NO_VERDICT, Story, Verdict
from .transitions import Transitions


class CoreState:
    """Catalog, rooms, options, policies, time, outbox and log of one planner. Single-threaded."""

    def __init__(
        self,
        options: PlannerOptions,
        rooms: Mapping[Tier, Room],
        *,
        choice: PolicyChoice,
        future: Future | None = None,
        secret: bytes = b"",
        ladder: Ladder = STANDARD,
        on_policy_failed: Callable[[str, str], None] = lambda words, instead: None,
    ) -> None:
        """`secret`: what no tenant knows, for names that policies hear (policy_facts.py) and for ids that
        callers are told (secret_ids.py). `ladder`: the tiers there can be; `rooms` says which there are.
        `on_policy_failed`: told in words when an administrator's own policy failed, and which one took its
        place. Raises ValueError for a wrong choice of policies."""
        assert ladder.put_tier in rooms, "puts need a room"
        log = rooms.get(ladder.log_tier)
        assert log is None or isinstance(log, SegmentLog)
        self.options = options
        self.ladder = ladder
        self.secret = secret
        self.rooms = rooms
        self.put_room = cast(MemoryRoom, rooms[ladder.put_tier])
        self.log = log
        #: Tiers that clients on this host read in place.
        self.shared = tuple(tier for tier in ladder.tiers_in_place if tier in rooms)
        self.now = 0.0  # seconds on the shell's clock
        self.asked_at = float("-inf")  # when a client said something last
        self.catalog = Catalog(ladder, rooms)
        self.story = Story(options.max_story_lines)
        #: What the story calls it when a block came into a tier, or was evicted from it, by tier.
        self.stored_in = {tier: f"stored_{tier.label}" for tier in ladder.tiers}
        self.evicted_from = {tier: f"evicted_{tier.label}" for tier in ladder.tiers}
        self.transitions = Transitions(self.catalog, self.words)
        self.outbox = Outbox()
        #: Tiers that do not work now.
        self.offline: set[Tier] = set()
        self.erased_tenants: set[str] = set()  # since the start
        #: Floor tiers of the pins on a block, by row. Sparse: few blocks are pinned.
        self.pin_floors: dict[int, list[Tier]] = {}
        #: Reservation of the put that writes a block, by row, until that put ends.
        self.writers: dict[int, int] = {}
        self.facts = PolicyFacts(self.catalog, secret)
        #: Bytes in flight per (source, target), and those of them that a request waits for; see copies.py.
        self.bytes_in_flight: dict[tuple[Tier | None, Tier], int] = {}
        self.urgent_bytes: dict[tuple[Tier | None, Tier], int] = {}
        self.costs = CostModel(
            options.default_bandwidth_bytes_per_s,
            options.default_latency_s,
            queued_bytes=self._queued_bytes,
            ladder=ladder,
        )
        #: What learners knew that do not run now, by name: kept for when they do again (policies/learned.py).
        self.absent_learners: dict[str, Any] = {}
        self._future = future
        self._on_policy_failed = on_policy_failed
        self.choice = choice
        self.policies = self.build_policies(choice)
        self.listeners = PolicyListeners(self.policies)

    def tell(self, row: int, what: str, why: str = "", verdict: Verdict = NO_VERDICT) -> None:
        """Tell the story that `what` happened to a block."""
        catalog = self.catalog
        self.story.tell(self.now, catalog.prefix_hash[row], what, why, verdict, catalog.namespace_id[row])

    def words(self, row: int) -> list[str]:
        """Return the story of a block as text, for error messages."""
        return self.story.words(self.catalog.prefix_hash[row], self.catalog.namespace_id[row])

    def readable_from(self, row: int) -> Tier | None:
        """Return the slowest tier that reading a whole block involves; None when it cannot be read now."""
        tier = self.catalog.tier_of(row)
        return None if tier in self.offline else tier

    def is_erased(self, namespace: NamespaceEntry) -> bool:
        """Whether its tenant was erased since the start: what others still hold of it is not taken over."""
        return bool(self.erased_tenants) and tenant_of(namespace.identity.domain) in self.erased_tenants

    def build_policies(self, choice: PolicyChoice, shared: Mapping[str, Any] | None = None) -> PolicySet:
        """Build the policies of `choice` for the present sizes of the tiers.
        `shared`: learners to go on with, by name. Raises ValueError."""
        capacities = {tier: room.statistics().capacity_bytes for tier, room in self.rooms.items()}
        return build(
            choice,
            self.facts,
            self.costs,
            capacities,
            self._future,
            shared,
            report=self._policy_failed,
            ladder=self.ladder,
        )

    def _policy_failed(self, words: str, instead: str) -> None:
        """Count that an administrator's own policy failed, and say so."""
        self.story.count("policies_failed")
        self._on_policy_failed(words, instead)

    def _queued_bytes(self, tier: Tier) -> int:
        """Return the bytes on the edge from `tier` to the put tier that go before a new load."""
        return self.urgent_bytes.get((tier, self.ladder.put_tier), 0)
