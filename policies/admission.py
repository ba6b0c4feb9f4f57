"""Admission that asks nothing: whatever comes gets a place, as long as somebody may leave for it."""

from .base import AdmissionPolicy, Newcomer, Surroundings, Victim


class AdmitAll(AdmissionPolicy):
    """Everybody is worth a place."""

    def __init__(self, surroundings: Surroundings) -> None:
        del surroundings

    def admits(self, newcomer: Newcomer, victim: Victim | None) -> bool:
        """Yes."""
        return True
