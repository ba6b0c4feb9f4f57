"""Policies of an administrator who wrote them last night: each breaks the contract in its own way."""

from collections.abc import Sequence

from kvtier.policies.base import (
    AdmissionPolicy,
    Expected,
    Newcomer,
    Observer,
    Prefetcher,
    SessionChange,
    Surroundings,
    Use,
    Victim,
)
from kvtier.policies.baselines.lru import LruEviction

NUM_GOOD_ANSWERS = 20


class Failing(LruEviction):
    """Does well until somebody counts on it."""

    def __init__(self, surroundings: Surroundings) -> None:
        super().__init__(surroundings)
        self._num_answers = 0

    def choose(self, now: float) -> Victim | None:
        self._num_answers += 1
        return self.fail(now) if self._num_answers > NUM_GOOD_ANSWERS else super().choose(now)

    def fail(self, now: float) -> Victim | None:
        raise KeyError("oops")


class Exiting(Failing):
    """Uses a library that ends the process."""

    def fail(self, now: float) -> Victim | None:
        raise SystemExit(3)


class ExitsWhenMade(LruEviction):
    """Reads the command line of a process that it thinks its own."""

    def __init__(self, surroundings: Surroundings) -> None:
        raise SystemExit(2)


class SameForEver(Failing):
    """Names one block again and again, and never takes it off its list."""

    def fail(self, now: float) -> Victim | None:
        return Victim(0, 0.0)


class NoRow(Failing):
    """Names rows from the end of the table."""

    def fail(self, now: float) -> Victim | None:
        return Victim(-5, 0.0)


class NoVictim(Failing):
    """Answers something else."""

    def fail(self, now: float) -> Victim | None:
        return "row 5"  # type: ignore[return-value]


class PricesInWords(LruEviction):
    """Its price is no number."""

    def price(self, row: int, now: float) -> float:
        return "cheap"  # type: ignore[return-value]


class Deaf(LruEviction):
    """Stumbles over what it hears."""

    def stored(self, rows: Sequence[int], use: Use) -> None:
        raise RuntimeError("too much")


class Forgetful(LruEviction):
    """Stumbles over what has left."""

    def left(self, rows: Sequence[int]) -> None:
        super().left(rows)
        raise RuntimeError("who?")


class FailingAdmission(AdmissionPolicy):
    """Cannot decide."""

    def __init__(self, surroundings: Surroundings) -> None:
        del surroundings

    def admits(self, newcomer: Newcomer, victim: Victim | None) -> bool:
        raise ZeroDivisionError


class ImpossiblePrefetcher(Prefetcher):
    """Expects blocks that there are not."""

    def __init__(self, surroundings: Surroundings) -> None:
        del surroundings

    def session_changed(self, change: SessionChange) -> None:
        pass

    def due(self, now: float, num_bytes: int) -> Sequence[Expected]:
        return [Expected([1 << 30], now + 60, "a feeling")]

    def next_at(self) -> float | None:
        return 0.0


class Unbuildable(LruEviction):
    """Needs something that nobody gives it."""

    def __init__(self, surroundings: Surroundings) -> None:
        raise LookupError("no model at hand")


class Something:
    """No policy at all."""

    def __init__(self, surroundings: Surroundings) -> None:
        del surroundings


class BadLearner(Observer):
    """Stumbles over what it hears, and over what it knows."""

    def used(self, rows: Sequence[int], use: Use) -> None:
        raise IndexError("no such habit")

    def dump(self) -> object:
        raise OSError("forgotten")

    def load(self, saved: object) -> None:
        raise ValueError("never seen")


class WithBadLearner(LruEviction):
    """Does well, but for what it shares with others."""

    def __init__(self, surroundings: Surroundings) -> None:
        super().__init__(surroundings)
        surroundings.shared.setdefault("habits", BadLearner())
