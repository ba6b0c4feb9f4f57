"""Guards around an administrator's own policies: one that fails is replaced by a plain one.

A policy under development raises, answers what is no block, or the same block for ever. The planner cannot
go on after any of that: the daemon would end, start again, and end at the same block. So a policy named
`module:Class` is called through a guard. The first time that it raises or answers nonsense, the cause is
reported, it is not called any more, and lru goes on with the candidates there are (everything is admitted;
nothing is prefetched).

Rejected: asking it again later, because it missed what happened meanwhile; guarding kvtier's own policies,
which run against the same contract suite and would pay a call for each of theirs.
"""

import math
import numbers
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias, TypeVar

from .base import (
    AdmissionPolicy,
    BlockFacts,
    EvictionPolicy,
    Expected,
    Newcomer,
    Observer,
    Prefetcher,
    SessionChange,
    Use,
    Victim,
)

Answer = TypeVar("Answer")
Report: TypeAlias = Callable[[str, str], None]
#: Blocks in one answer to `choose` that left meanwhile, until it counts as one that only names those.
MAX_STALE = 1024


class InvalidAnswer(ValueError):
    """An answer that the contract in base.py does not allow."""


class Trouble:
    """Whether one policy has failed.

    `report` is called once, with what happened and what happens instead, in words; what it raises
    passes through.
    """

    def __init__(self, name: str, instead: str, report: Report) -> None:
        self.has_failed = False
        self._name, self._instead, self._report = name, instead, report

    def note(self, error: BaseException) -> None:
        """Mark the policy as failed, and report the error."""
        self.has_failed = True
        where = [] if isinstance(error, InvalidAnswer) else traceback.extract_tb(error.__traceback__)[-1:]
        at = "".join(f", {Path(one.filename).name}:{one.lineno}, in {one.name}" for one in where)
        self._report(f"policy {self._name!r} failed with {type(error).__name__}: {error}{at}", self._instead)


class GuardedEviction(EvictionPolicy):
    """Calls `policy` until it fails, and `standby` from then on. Keeps the candidates, to hand them over."""

    def __init__(
        self, policy: EvictionPolicy, standby: EvictionPolicy, facts: BlockFacts, trouble: Trouble
    ) -> None:
        self._policy, self._standby = policy, standby
        self._facts, self._trouble = facts, trouble
        self._candidates: set[int] = set()
        self._now = 0.0

    def used(self, rows: Sequence[int], use: Use) -> None:
        """Forward the call to the policy in use."""
        self._ask(lambda policy: policy.used(rows, use))

    def stored(self, rows: Sequence[int], use: Use) -> None:
        """Forward the call to the policy in use."""
        self._ask(lambda policy: policy.stored(rows, use))

    def session_changed(self, change: SessionChange) -> None:
        """Forward the call to the policy in use."""
        self._ask(lambda policy: policy.session_changed(change))

    def forgotten(self, rows: Sequence[int]) -> None:
        """Forward the call to the policy in use."""
        self._candidates.difference_update(rows)
        self._ask(lambda policy: policy.forgotten(rows))

    def offer(self, rows: Sequence[int], now: float) -> None:
        """Forward the call to the policy in use."""
        self._candidates.update(rows)
        self._now = now
        self._ask(lambda policy: policy.offer(rows, now))

    def price(self, row: int, now: float) -> float:
        """Return the policy's price; anything but a number is a failure."""
        return self._ask(lambda policy: _number(policy.price(row, now), "price"))

    def num_no_dearer(self, rows: Sequence[int], price: float, now: float) -> int:
        """Return the policy's count; anything but 0 to len(rows) is a failure."""

        def asked(policy: EvictionPolicy) -> int:
            count = policy.num_no_dearer(rows, price, now)
            if not isinstance(count, numbers.Integral) or not 0 <= count <= len(rows):
                raise InvalidAnswer(f"num_no_dearer answered {count!r} of {len(rows)} blocks")
            return int(count)

        return self._ask(asked)

    def choose(self, now: float) -> Victim | None:
        """Return the policy's victim; a row that is no candidate any more is skipped."""
        self._now = now
        for _ in range(MAX_STALE):
            victim = self._ask(lambda policy: _victim(policy.choose(now)))
            if victim is None:
                return None
            if victim.row in self._candidates:
                self._candidates.discard(victim.row)
                return victim
            if self._trouble.has_failed:
                return None
        self._fail(InvalidAnswer(f"choose names no candidate, {MAX_STALE} times in a row"))
        return self.choose(now)

    def left(self, rows: Sequence[int]) -> None:
        """Forward the call to the policy in use."""
        self._candidates.difference_update(rows)
        self._ask(lambda policy: policy.left(rows))

    def __len__(self) -> int:
        return len(self._candidates)

    # ------------------------------------------------------------------------------------ internals

    def _ask(self, question: Callable[[EvictionPolicy], Answer]) -> Answer:
        if not self._trouble.has_failed:
            try:
                return question(self._policy)
            except (Exception, SystemExit) as error:  # the code is an administrator's
                self._fail(error)
        return question(self._standby)

    def _fail(self, error: BaseException) -> None:
        last_used = self._facts.last_used
        rows = sorted(self._candidates, key=lambda row: (last_used[row], row))
        self._standby.offer(rows, self._now)
        self._trouble.note(error)


class GuardedAdmission(AdmissionPolicy):
    """Calls `policy` until it fails; admits everything from then on."""

    def __init__(self, policy: AdmissionPolicy, trouble: Trouble) -> None:
        self._policy, self._trouble = policy, trouble

    def admits(self, newcomer: Newcomer, victim: Victim | None) -> bool:
        """Return the policy's answer."""
        if not self._trouble.has_failed:
            try:
                return bool(self._policy.admits(newcomer, victim))
            except (Exception, SystemExit) as error:
                self._trouble.note(error)
        return True


class GuardedLearner(Observer):
    """Tells an administrator's own learner in `Surroundings.shared` what happens, until it fails."""

    def __init__(self, learner: Observer, trouble: Trouble) -> None:
        self._learner, self._trouble = learner, trouble

    def used(self, rows: Sequence[int], use: Use) -> None:
        """Forward the call to the learner."""
        self._ask(lambda: self._learner.used(rows, use), None)

    def stored(self, rows: Sequence[int], use: Use) -> None:
        """Forward the call to the learner."""
        self._ask(lambda: self._learner.stored(rows, use), None)

    def session_changed(self, change: SessionChange) -> None:
        """Forward the call to the learner."""
        self._ask(lambda: self._learner.session_changed(change), None)

    def forgotten(self, rows: Sequence[int]) -> None:
        """Forward the call to the learner."""
        self._ask(lambda: self._learner.forgotten(rows), None)

    def _ask(self, question: Callable[[], Answer], otherwise: Answer) -> Answer:
        if not self._trouble.has_failed:
            try:
                return question()
            except (Exception, SystemExit) as error:
                self._trouble.note(error)
        return otherwise


class GuardedPrefetcher(GuardedLearner, Prefetcher):
    """Calls `policy` until it fails; prefetches nothing from then on."""

    def __init__(self, policy: Prefetcher, facts: BlockFacts, trouble: Trouble) -> None:
        super().__init__(policy, trouble)
        self._policy, self._facts = policy, facts

    def due(self, now: float, num_bytes: int) -> Sequence[Expected]:
        """Return what the policy expects; a row that does not exist is a failure."""
        return self._ask(
            lambda: [_expected(one, len(self._facts.last_used)) for one in self._policy.due(now, num_bytes)],
            [],
        )

    def next_at(self) -> float | None:
        """Return the policy's time, or None; NaN is a failure."""

        def asked() -> float | None:
            at = self._policy.next_at()
            if at is not None and math.isnan(_number(at, "next_at")):
                raise InvalidAnswer("next_at answered NaN; None is for never")
            return at

        return self._ask(asked, None)


def _number(value: object, asked: str) -> float:
    if not isinstance(value, numbers.Real):
        raise InvalidAnswer(f"{asked} answered {value!r}, which is no number")
    return float(value)


def _victim(answer: object) -> Victim | None:
    if answer is None:
        return None
    if not isinstance(answer, Victim) or not isinstance(answer.row, numbers.Integral):
        raise InvalidAnswer(f"choose answered {answer!r}; it is a Victim or None")
    return answer._replace(row=int(answer.row), price=_number(answer.price, "choose, as the price,"))


def _expected(answer: object, num_rows: int) -> Expected:
    if not isinstance(answer, Expected) or math.isnan(_number(answer.until, "due, as the end,")):
        raise InvalidAnswer(f"due answered {answer!r}; it is a list of Expected")
    if not all(isinstance(row, numbers.Integral) and 0 <= row < num_rows for row in answer.rows):
        raise InvalidAnswer("due expects blocks that there are not")
    return answer
