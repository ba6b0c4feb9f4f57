"""Policies as an administrator writes them: a class in a module of their own, named `module:Class`."""

from kvtier.policies.base import Surroundings
from kvtier.policies.baselines.priced import PricedEviction
from kvtier.policies.options import read_numbers

#: As it stands in the settings; `policy.allowed_modules` names "tests".
LONGEST_FIRST = "tests.policies.own:LongestFirstEviction"


class LongestFirstEviction(PricedEviction):
    """Who stands furthest from the beginning of its chain leaves first."""

    def __init__(self, surroundings: Surroundings) -> None:
        super().__init__(surroundings)
        read_numbers("longest_first", surroundings.options, {})

    def price(self, row: int, now: float) -> float:
        """Return how near to the beginning a block stands."""
        return -float(self._facts.position[row])
