"""Refusals: a cold store that takes nothing.

A file system that went read-only, or a disk that fails every write, is still good for reading, so the tier is
not lost. But what has to be spilled before it is evicted would never be evicted: memory would keep what it
happens to hold, every put would wait for room until its deadline, and the same blocks would be written in
vain as fast as the device says no. So after MAX_REFUSALS refused batches in a row nothing is spilled for
PAUSE_S, and the coldest blocks are evicted as where there is no slower tier. The same when it is full of what
must stay there (reclaim.py): what memory holds keeps that there, so nothing would ever change. And for as
long as not even its metadata can be written: then nothing is reclaimed, either.

Rejected: giving the tier up (all that is stored there would be a miss), and doing so with the first refusal
(a single bad sector would cost a second's worth of blocks that were acknowledged)."""

from collections.abc import Iterable
from typing import Final

from ....tiers.base import DISK_CAUSES, Cause
from ..catalog.core_state import CoreState

MAX_REFUSALS: Final = 3  # batches in a row
PAUSE_S: Final = 1.0
MAX_IDLE_PAUSE_S: Final = 60.0


class Refusals:
    """Counts what the cold store did not take."""

    def __init__(self, core: CoreState) -> None:
        self._core = core
        self._num_in_a_row = 0
        self.ask_again_at = 0.0
        self.idle_again_at = 0.0  # no idle copy before
        self._idle_pause_s = 0.0
        self.is_full = False  # and the pause that was begun last was for that
        self.is_stopped = False  # it cannot even be said what is there: no pause, until it can

    @property
    def is_pausing(self) -> bool:
        """Whether nothing is to be spilled now."""
        return self.is_stopped or self._core.now < self.ask_again_at

    def spilled(self, causes: Iterable[Cause | None]) -> None:
        """A batch from memory into the cold store ended so."""
        found = set(causes)
        if None in found:
            self._num_in_a_row = 0
            self._idle_pause_s = self.idle_again_at = 0.0
            return
        if Cause.DOES_NOT_FIT not in found:  # that is tried again as it is, at once
            # Each failed record takes room of the log until its segment is freed: idle copies can wait.
            self._idle_pause_s = min(MAX_IDLE_PAUSE_S, max(PAUSE_S, 2 * self._idle_pause_s))
            self.idle_again_at = self._core.now + self._idle_pause_s
        if found <= set(DISK_CAUSES):
            self._num_in_a_row += 1
            if self._num_in_a_row >= MAX_REFUSALS:
                self._pause("spills_refused")

    def full(self, pause_s: float = PAUSE_S) -> None:
        """Ask nothing of the cold store for `pause_s`: there is no room, and nothing there may leave."""
        if not self.is_pausing:
            self._pause(f"{self._core.ladder.log_tier.label}_full")
            self.is_full = True
        self.ask_again_at = max(self.ask_again_at, self._core.now + pause_s)

    def _pause(self, counter: str) -> None:
        self.is_full = False
        self.ask_again_at = self._core.now + PAUSE_S
        self._core.story.count(counter)
