"""PolicyListeners: calls policies and learners once per request with what was used, stored or forgotten.

Only listeners that override a method are called: most policies ignore most events, and some of these occur
ten thousand times a second.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from ....policies.base import EvictionPolicy, Observer, SessionChange, Use
from ....policies.registry import PolicySet
from ....tiers.block import Tier

HearUse: TypeAlias = Callable[[Sequence[int], Use], None]
HearRows: TypeAlias = Callable[[Sequence[int]], None]


@dataclass(slots=True)
class Listener:
    """The callbacks of a part of the core: `used` and `left` run before the policies', `stored` after."""

    used: HearUse | None = None
    left: Mapping[Tier, HearRows] = field(default_factory=dict)
    stored: HearUse | None = None


class PolicyListeners:
    """Calls each observer with the events it overrides, shared learners first."""

    def __init__(self, policies: PolicySet) -> None:
        self._joined: list[Listener] = []
        self.gather(policies)

    def gather(self, policies: PolicySet) -> None:
        """Tell these from now on, and the parts of the core that joined."""
        observers = policies.observers
        self._used: list[HearUse] = [o.used for o in observers if type(o).used is not Observer.used]
        self._stored: list[HearUse] = [o.stored for o in observers if type(o).stored is not Observer.stored]
        self._forgotten = [o.forgotten for o in observers if type(o).forgotten is not Observer.forgotten]
        self._session_changed = [
            o.session_changed for o in observers if type(o).session_changed is not Observer.session_changed
        ]
        self._left: dict[Tier, list[HearRows]] = {
            tier: [policy.left]
            for tier, policy in policies.evictions.items()
            if type(policy).left is not EvictionPolicy.left
        }
        for listener in self._joined:
            self._hear(listener)

    def join(self, listener: Listener) -> None:
        """Tell a part of the core, too, from now on."""
        self._joined.append(listener)
        self._hear(listener)

    def _hear(self, listener: Listener) -> None:
        if listener.used is not None:
            self._used.insert(0, listener.used)
        if listener.stored is not None:
            self._stored.append(listener.stored)
        for tier, left in listener.left.items():
            self._left.setdefault(tier, []).insert(0, left)

    def used(self, rows: Sequence[int], use: Use) -> None:
        """A request used these blocks. Told before the columns of the catalog say so."""
        if rows:
            for hear in self._used:
                hear(rows, use)

    def stored(self, rows: Sequence[int], use: Use) -> None:
        """A put made these blocks readable."""
        if rows:
            for hear in self._stored:
                hear(rows, use)

    def session_changed(self, change: SessionChange) -> None:
        """A session said something about itself."""
        for hear in self._session_changed:
            hear(change)

    def left(self, rows: Sequence[int], tier: Tier) -> None:
        """These blocks left a tier."""
        for hear in self._left.get(tier, ()):
            hear(rows)

    def forgotten(self, rows: Sequence[int]) -> None:
        """These rows are about to be free."""
        for hear in self._forgotten:
            hear(rows)
