"""Remembered: what is known by key, in parts by tenant, so that what one asks for makes none of the others
forget what it needs. Beyond the capacity the tenant that has the most forgets its oldest value.

Shares with a part reserved for each tenant were rejected: of a memory what others do not use can all be
lent, because nothing is lost by taking it back.
"""

from collections import OrderedDict
from typing import Final, Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")

#: Of which anything is remembered. Beyond, the one that had the last new value longest ago is forgotten.
MAX_TENANTS: Final = 1024
#: So often the same tenant forgets before it is looked which one has the most.
LOOK_EVERY: Final = 64


class Remembered(Generic[K, V]):
    """At most `capacity` values of all tenants together."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._num_values = 0
        self._of_tenant: OrderedDict[str, OrderedDict[K, V]] = OrderedDict()
        self._largest = ""  # the tenant that had the most when it was last looked
        self._num_left = 0  # values forgotten until it is looked again

    def __len__(self) -> int:
        return self._num_values

    def get(self, tenant: str, key: K) -> V | None:
        """Return what is remembered; None: nothing."""
        known = self._of_tenant.get(tenant)
        return known.get(key) if known else None

    def put(self, tenant: str, key: K, value: V) -> None:
        """Remember a value as the tenant's latest."""
        known = self._of_tenant.get(tenant)
        if known is None:
            known = self._of_tenant[tenant] = OrderedDict()
            if len(self._of_tenant) > MAX_TENANTS:
                self._num_values -= len(self._of_tenant.popitem(last=False)[1])
        if known.pop(key, None) is None:
            self._of_tenant.move_to_end(tenant)
            self._num_values += 1
        known[key] = value
        if self._num_values > self._capacity:
            self._forget_one_for(tenant)

    def _forget_one_for(self, tenant: str) -> None:
        """Forget the oldest value of the tenant that has the most, of `tenant` when none has more."""
        num_own, largest = len(self._of_tenant[tenant]), self._of_tenant.get(self._largest)
        if not self._num_left or largest is None or len(largest) < num_own:
            self._largest = max(self._of_tenant, key=lambda one: len(self._of_tenant[one]))
            self._num_left = LOOK_EVERY
        self._num_left -= 1
        if len(self._of_tenant[self._largest]) > num_own:
            tenant = self._largest
        known = self._of_tenant[tenant]
        known.popitem(last=False)
        self._num_values -= 1
        if not known:
            del self._of_tenant[tenant]
