"""Admission of every block, as long as something else can be evicted for it."""

from .base import AdmissionPolicy, Newcomer, Surroundings, Victim


class AdmitAll(AdmissionPolicy):
    """Admits every block."""

    def __init__(self, surroundings: Surroundings) -> None:
        del surroundings

    def admits(self, newcomer: Newcomer, victim: Victim | None) -> bool:
        """Return True."""
        return True
