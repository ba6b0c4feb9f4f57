"""Mutants of memory that is taken over from an earlier daemon."""

from typing import Any

from kvtier.appliance.core.requests import found_memory
from kvtier.tiers.memory.slots import SlotPool

Patch = tuple[Any, str, Any]


def believed() -> list[Patch]:
    """What is found is believed, whatever its bytes are."""
    verified = found_memory.FoundMemory.verified

    def credulous(self: Any, event: Any) -> None:
        event.are_right = [True] * len(event.fragments)
        verified(self, event)

    return [(found_memory.FoundMemory, "verified", credulous)]


def found_after_erasing() -> list[Patch]:
    """What a tenant had is found although it was erased."""
    adopt = found_memory.FoundMemory._adopt

    def forgetful(self: Any, tier: Any, place: int, label: Any) -> bool:
        erased, self._erased = self._erased, frozenset()
        try:
            return adopt(self, tier, place, label)
        finally:
            self._erased = erased

    return [(found_memory.FoundMemory, "_adopt", forgetful)]


def views_forgotten() -> list[Patch]:
    """Memory that former clients still view is used again at once."""
    adopt = SlotPool.adopt

    def hasty(self: Any, number: int, domain: int, sizes: Any, is_closed: bool = False) -> None:
        adopt(self, number, domain, sizes)
        if is_closed:
            self._closed.add(number)  # for `open_again`
            self._make_available(number)

    def available(self: Any, number: int) -> None:
        closed, self._closed = self._closed, set()
        try:
            make_available(self, number)
        finally:
            self._closed = closed

    make_available = SlotPool._make_available
    return [(SlotPool, "adopt", hasty), (SlotPool, "_make_available", available)]


def orphans() -> list[Patch]:
    """What is found is not linked to what was found before it."""

    def lonely(self: Any, namespace: Any, label: Any) -> int:
        row = add(self, namespace, label)
        self._orphans.clear()
        return row

    add = found_memory.FoundMemory._add
    return [(found_memory.FoundMemory, "_add", lonely)]


def two_domains() -> list[Patch]:
    """Of an extent with bytes of two isolation domains what is of one of them is taken."""

    def generous(self: Any, fragments: Any) -> Any:
        domains = [self._domain_of(label) for _, label in fragments]
        return [one for one, domain in zip(fragments, domains, strict=True) if domain == domains[0]]

    return [(found_memory.FoundMemory, "takes", generous)]


#: Name, what is broken, how.
PLANTED = [
    ("found and believed", "bytes of found memory are not verified", believed),
    ("found after erasing", "an erased tenant's memory is found again", found_after_erasing),
    ("views forgotten", "memory in view of former clients is written", views_forgotten),
    ("found alone", "found blocks are not linked", orphans),
    ("found of two domains", "an extent with another domain's bytes is taken", two_domains),
]
