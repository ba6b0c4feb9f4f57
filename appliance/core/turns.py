"""Turns: what waits, by tenant. Within a tenant first come first served; tenants take turns."""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class TenantTurns(Generic[T]):
    """Items of tenants, each in the order in which they came. Bounded by its owner."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, deque[T]] = OrderedDict()  # the tenant that has its turn first
        self._len = 0

    def __len__(self) -> int:
        return self._len

    def __iter__(self) -> Iterator[T]:
        for queue in self._waiting.values():
            yield from queue

    def add(self, tenant: str, item: T) -> None:
        """Let an item wait behind those of its tenant."""
        self._waiting.setdefault(tenant, deque()).append(item)
        self._len += 1

    def first(self) -> T:
        """Return the next item of the tenant that has its turn. Raises StopIteration without any."""
        return next(iter(self._waiting.values()))[0]

    def pass_on(self) -> None:
        """Give the turn to the next tenant; the first item stays the first of its own."""
        self._waiting.move_to_end(next(iter(self._waiting)))

    def pop(self) -> tuple[str, T]:
        """Remove and return the next item, behind its tenant, which has the last turn then.
        Raises KeyError without any."""
        tenant, queue = self._waiting.popitem(last=False)
        item = queue.popleft()
        self._len -= 1
        if queue:
            self._waiting[tenant] = queue
        return tenant, item

    def pop_of(self, tenant: str) -> T | None:
        """Remove and return the first item of a tenant; None when it has none."""
        queue = self._waiting.get(tenant)
        if queue is None:
            return None
        item = queue.popleft()
        self._len -= 1
        if not queue:
            del self._waiting[tenant]
        return item

    def take(self, wanted: Callable[[T], bool]) -> list[T]:
        """Remove and return the wanted items."""
        taken = []
        for tenant, queue in list(self._waiting.items()):
            if found := [item for item in queue if wanted(item)]:
                taken += found
                left = self._waiting[tenant] = deque(item for item in queue if not wanted(item))
                if not left:
                    del self._waiting[tenant]
        self._len -= len(taken)
        return taken
