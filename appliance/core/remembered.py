"""Remembered: what is known by key, of each tenant its share at most. Beyond that its oldest is forgotten."""

from collections import OrderedDict
from typing import Generic, TypeVar

from .shares import Shares

K = TypeVar("K")
V = TypeVar("V")


class Remembered(Generic[K, V]):
    """At most `capacity` values of all tenants together (shares.py). None of another tenant is forgotten."""

    def __init__(self, capacity: int, num_tenants: int) -> None:
        self._shares = Shares(capacity, num_tenants)
        self._of_tenant: dict[str, OrderedDict[K, V]] = {}

    def __len__(self) -> int:
        return self._shares.taken

    def resize(self, capacity: int, num_tenants: int) -> None:
        """Share the places among another number of tenants. What is remembered stays."""
        self._shares.resize(capacity, num_tenants)

    def get(self, tenant: str, key: K) -> V | None:
        """Return what is remembered; None: nothing."""
        known = self._of_tenant.get(tenant)
        return known.get(key) if known else None

    def put(self, tenant: str, key: K, value: V) -> None:
        """Remember a value as the tenant's latest. Without a place for the tenant it is forgotten at once."""
        known = self._of_tenant.setdefault(tenant, OrderedDict())
        if known.pop(key, None) is None and not self._shares.take(tenant, 1):
            if not known:
                return
            known.popitem(last=False)
        known[key] = value
