"""Shares: how much of a limited resource each tenant may hold, so that none can take what all need.

Half of the resource is reserved for the configured tenants, in equal parts. Above its part a tenant takes
from the other half, at most as much as it leaves free there (the dynamic threshold of Choudhury and Hahne,
IEEE/ACM Transactions on Networking, 1998): one tenant alone gets a half of it, two get a third each. So
resources are used where there are few tenants, and there is always something left for the next one.
"""

from collections import Counter


class Shares:
    """Counts what each tenant holds of `capacity` bytes or items, and decides whether it may take more.

    With 0 `num_tenants` there are none to protect, and everything may be taken. None: nothing is reserved,
    and only the common tenant "" may take everything.
    """

    def __init__(self, capacity: int, num_tenants: int | None = None) -> None:
        self.taken = 0
        self._taken_by: Counter[str] = Counter()
        self.resize(capacity, num_tenants)

    def resize(self, capacity: int, num_tenants: int | None) -> None:
        """Set another capacity and number of tenants. What was taken stays taken."""
        self.capacity = capacity
        self.reserved = capacity // (2 * num_tenants) if num_tenants else 0  # for each tenant
        self._pool = capacity - self.reserved * (num_tenants or 0)
        self._num_tenants = num_tenants
        self._taken_of_pool = sum(map(self._of_pool, self._taken_by.values()))

    def largest(self, tenant: str) -> int:
        """Return the most that a tenant can hold while no other holds anything."""
        return self.reserved + self._pool // 2 if self._is_bounded(tenant) else self.capacity

    def held(self, tenant: str) -> int:
        """Return what a tenant holds."""
        return self._taken_by[tenant]

    def may_take(self, tenant: str, number: int) -> bool:
        """Return whether a tenant's share and what is free allow it `number` more."""
        return not self.lacking(tenant, number)

    def lacking(self, tenant: str, number: int) -> int:
        """Return how much at least has to be given back before a tenant may take `number`; 0: it may now.
        It can be more, if others than this tenant give it back."""
        lacking = self.taken + number - self.capacity
        if self._is_bounded(tenant):
            held = self._taken_by[tenant]
            of_pool = self._of_pool(held + number)
            if of_pool:  # at most what stays free: each item given back by the tenant itself counts twice
                of_others = self._taken_of_pool - self._of_pool(held)
                lacking = max(lacking, (2 * of_pool + of_others - self._pool + 1) // 2)
        return max(0, lacking)

    def take(self, tenant: str, number: int) -> bool:
        """Take `number` for a tenant, if it may have it; returns whether it may."""
        if not self.may_take(tenant, number):
            return False
        self.add(tenant, number)
        return True

    def add(self, tenant: str, number: int) -> None:
        """Count `number` (negative: given back) for a tenant, whatever its share is."""
        held = self._taken_by[tenant]
        self.taken += number
        self._taken_of_pool += self._of_pool(held + number) - self._of_pool(held)
        self._taken_by[tenant] = held + number
        if not held + number:
            del self._taken_by[tenant]

    def give(self, tenant: str, number: int) -> None:
        """Give `number` of a tenant back."""
        self.add(tenant, -number)

    def drain(self, number: int) -> None:
        """Give `number` back in equal parts of all tenants, as far as they hold anything."""
        left = min(number, self.taken)
        tenants = sorted(self._taken_by, key=self._taken_by.__getitem__)
        for num_left, tenant in zip(range(len(tenants), 0, -1), tenants, strict=True):
            part = min(self._taken_by[tenant], left // num_left)
            self.give(tenant, part)
            left -= part

    def holders(self) -> dict[str, int]:
        """Return what each tenant holds that holds anything."""
        return dict(self._taken_by)

    def _is_bounded(self, tenant: str) -> bool:
        return bool(tenant) if self._num_tenants is None else self._num_tenants > 0

    def _of_pool(self, held: int) -> int:
        """Return how much of what a tenant holds stands above its reserved part."""
        return max(0, held - self.reserved)
