"""Mutants of the error budget: what was decoded from a lossy record is encoded lossily again.

That a restart forgets what is spent is not among them: a record has to be lost twice around a crash, which
no seed in thousands does. tests/appliance/core/copying/test_error_budget.py does.
"""

from typing import Any

from kvtier.appliance.core.catalog import catalog
from kvtier.appliance.core.copying import copies

from . import wear

Patch = tuple[Any, str, Any]
#: These are hunted where it happens: in a worn cold store, whatever the seed.
WORN = [(wear, "FRACTION", 1.0)]


def spent_is_not_looked_at() -> list[Patch]:
    """The choice of an encoding does not ask what a fragment has lost already."""
    choose = catalog.Catalog.choose_encoding

    def careless(self: Any, fragment: int, namespace: Any) -> int:
        spent, self.spent = self.spent, set()
        number = choose(self, fragment, namespace)
        self.spent = spent
        return number

    return [*WORN, (catalog.Catalog, "choose_encoding", careless)]


def spent_is_not_noted() -> list[Patch]:
    """Nobody writes down that a fragment was decoded from a lossy record."""
    return [*WORN, (copies.Copies, "_note_spent", lambda self, batch, fragment, label: None)]


#: Name, what is broken, how.
PLANTED = [
    ("spent, not asked", "what is spent is encoded lossily again", spent_is_not_looked_at),
    ("spent, not noted", "what came from a lossy record counts as new", spent_is_not_noted),
]
