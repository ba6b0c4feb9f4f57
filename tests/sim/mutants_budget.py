"""Mutants of the error budget: what was decoded from a lossy record is encoded lossily again."""

from typing import Any

from kvtier.appliance.core import catalog, copies, recovery

Patch = tuple[Any, str, Any]


def spent_is_not_looked_at() -> list[Patch]:
    """The choice of an encoding does not ask what a fragment has lost already."""
    choose = catalog.Catalog.choose_encoding

    def careless(self: Any, fragment: int, namespace: Any) -> int:
        spent, self.spent = self.spent, set()
        number = choose(self, fragment, namespace)
        self.spent = spent
        return number

    return [(catalog.Catalog, "choose_encoding", careless)]


def spent_is_not_noted() -> list[Patch]:
    """Nobody writes down that a fragment was decoded from a lossy record."""
    return [(copies.Copies, "_note_spent", lambda self, batch, fragment, label: None)]


def spent_is_lost_at_start() -> list[Patch]:
    """A restart forgets it: the records' flag is not read."""
    extend = recovery._extend_fragments

    def careless(known: Any, *rest: Any) -> None:
        extend(known, *rest)
        known.spent.clear()

    return [(recovery, "_extend_fragments", careless)]


#: Name, what is broken, how.
PLANTED = [
    ("spent, not asked", "what is spent is encoded lossily again", spent_is_not_looked_at),
    ("spent, not noted", "what came from a lossy record counts as new", spent_is_not_noted),
    ("spent, not recovered", "after a restart it counts as new", spent_is_lost_at_start),
]
