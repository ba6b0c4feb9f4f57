"""Changes: another policy comes into force while everything goes on.

The new options come into force in one place (core_state.py), the policies are built anew and told of what is
stored, tiers begin to grow or shrink (resizing.py). No request is refused or repeated for it: limits hold for
what comes from now on, and what was granted under the old ones stays granted.

What was learned is kept where it still says something. A policy that has the same name and options as before
stays the very object it was; a learner that both the old and the new policies want (the forecast) is handed
over; a policy that is new starts as after a restart: it is offered every candidate, least recently used
first, and reads the rest from the catalog.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ...policies.base import EvictionPolicy, Observer
from ...policies.learned import hand_over
from ...policies.registry import PolicyChoice
from ...policies.retained import RetainedEviction
from ...tiers.block import Tier
from .capacity.resizing import Resizing
from .capacity.victims import Victims
from .catalog.core_state import CoreState
from .catalog.residency import Residency
from .catalog.runs import column
from .events import PolicyChanged
from .requests.pins import Pins


class Changes:
    """Applies PolicyChanged, and says beforehand why it could not be.

    Calls `listeners` of the parts that derive something from the options; others read them when needed.
    """

    def __init__(
        self,
        core: CoreState,
        residency: Residency,
        victims: Victims,
        resizing: Resizing,
        pins: Pins,
        listeners: Sequence[Callable[[], None]],
    ) -> None:
        self._core = core
        self._residency = residency
        self._victims = victims
        self._resizing = resizing
        self._pins = pins
        self._listeners = listeners

    def objections(self, change: PolicyChanged) -> list[str]:
        """Say why `change` must not be applied; empty when it may be. Changes nothing."""
        core = self._core
        problems = []
        for tier, num_units in change.num_units.items():
            if tier not in core.rooms:
                problems.append(f"tier {tier.label} does not exist in this life of the daemon; restart it")
                continue
            books = core.rooms[tier].statistics()
            unit_bytes = books.capacity_bytes // self.num_units(tier)
            pinned_bytes = self._pins.pinned_bytes(tier)
            if num_units * unit_bytes < pinned_bytes:
                problems.append(
                    f"tier {tier.label} cannot shrink to {num_units * unit_bytes} bytes: "
                    f"{pinned_bytes} are pinned; unpin first"
                )
        try:
            core.build_policies(change.policies)
        except Exception as error:  # an administrator's own policy may raise anything
            problems.append(f"policy: {error}")
        return problems

    def num_units(self, tier: Tier) -> int:
        """Return how many extents or segments a tier has, without those that leave."""
        room: Any = self._core.rooms[tier]
        count: int = room.num_segments if tier == self._core.ladder.log_tier else room.num_extents
        return count

    def apply(self, change: PolicyChanged) -> None:
        """Let `change` be in force from now on."""
        core = self._core
        core.options = change.options
        for listener in self._listeners:
            listener()
        for tier, num_units in change.num_units.items():
            self._resizing.resize(tier, num_units)
        if change.policies != core.choice:
            self._adopt(change.policies)
        core.story.count("policies_changed")

    def _adopt(self, choice: PolicyChoice) -> None:
        """Put the policies of `choice` in the place of those there are."""
        core = self._core
        old, before = core.policies, core.choice
        wanted = core.build_policies(choice).shared
        new = core.build_policies(choice, {name: old.shared[name] for name in wanted if name in old.shared})
        hand_over(old.shared, new.shared, core.absent_learners)
        going_on: dict[int, Observer] = {}  # by the id of the new object that stands for the same
        new_tiers = []
        for tier, policy in new.evictions.items():
            if _is_same(before, choice, before.eviction, choice.eviction):
                earlier = new.evictions[tier] = old.evictions[tier]
                going_on |= {id(policy): earlier, id(_inner(policy)): _inner(earlier)}
            else:
                new_tiers.append(tier)
        for tier in new.admissions:
            if _is_same(before, choice, before.admission, choice.admission):
                new.admissions[tier] = old.admissions[tier]
        if old.prefetcher is not None and _is_same(before, choice, before.prefetch, choice.prefetch):
            going_on[id(new.prefetcher)] = new.prefetcher = old.prefetcher
        new.observers = [going_on.get(id(one), one) for one in new.observers]
        core.policies, core.choice = new, choice
        core.listeners.gather(new)
        for tier in new_tiers:
            self._victims.forget(tier)
            self._offer_all(tier, new.evictions[tier])

    def _offer_all(self, tier: Tier, policy: EvictionPolicy) -> None:
        """Show a policy that has seen nothing yet what may leave, least recently used first."""
        catalog, residency = self._core.catalog, self._residency
        may_go = column(catalog.num_resident[tier]) > 0
        may_go &= column(catalog.num_children_placed[tier]) == 0  # the most telling part of is_candidate
        rows = np.flatnonzero(may_go)
        rows = rows[np.argsort(column(catalog.last_used)[rows], kind="stable")]
        candidates = [row for row in rows.tolist() if residency.is_candidate(row, tier)]
        if candidates:
            policy.offer(candidates, self._core.now)


def _is_same(before: PolicyChoice, after: PolicyChoice, old_name: str, new_name: str) -> bool:
    """Whether a policy goes on as it is: named as before, with the options it had."""
    return old_name == new_name and before.options.get(old_name) == after.options.get(new_name)


def _inner(policy: EvictionPolicy) -> EvictionPolicy:
    """Return what an administrator chose, without the bands of retention around it."""
    return policy.inner if isinstance(policy, RetainedEviction) else policy
