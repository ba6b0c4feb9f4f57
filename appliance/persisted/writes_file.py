"""How much was written to the cold store's device, on disk beside it: a restart is no new day.

`writes.json` in the directory of `tiers.nvme`, kept as learned_file.py keeps what policies learned, every
KEEP_INTERVAL_S and at the end. A daemon that is killed forgets what was written since: that much more may be
written that day. A file that is missing or damaged costs a log line, and the budget begins anew.
"""

import json
import logging
from collections.abc import Callable
from pathlib import Path

from ..config.units import about_bytes
from ..core.copying.write_budget import WriteBudget
from .learned_file import LearnedFile

log = logging.getLogger(__name__)

STEM = "writes"
KEEP_INTERVAL_S = 30.0
MAX_BYTES = 1 << 16


class WritesFile(LearnedFile):
    """Keeps the state of a budget. `clock` is the planner's, `wall_clock` goes on over restarts."""

    def __init__(
        self,
        directory: Path | None,
        budget: WriteBudget,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        interval_s: float = KEEP_INTERVAL_S,
    ) -> None:
        super().__init__(directory, self._state, interval_s, STEM)
        self._budget = budget
        self._now = clock
        self._wall_clock = wall_clock
        self._was_overdrawn = False

    def restore(self, data: bytes) -> None:
        """Go on with what was kept. Never raises."""
        if not data:
            return
        now = self._now()
        try:
            kept = json.loads(data)
            ago_s = max(0.0, self._wall_clock() - float(kept["at"]))  # or the clock was set back
            self._budget.restore(kept, now - ago_s)
        except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError) as problem:
            log.warning("%s.json is not understood (%s); writes count from 0", STEM, type(problem).__name__)

    def _state(self) -> bytes:
        now = self._now()
        self._warn(now)
        state = self._budget.state()
        if state is None:
            return b""
        state["at"] = round(self._wall_clock() - (now - state["as_of"]))
        return json.dumps(state).encode()

    def _warn(self, now: float) -> None:
        """Log once that more was written than the budget allows.

        Idle copies wait for it; spills, and puts in mode `through`, do not.
        """
        is_overdrawn = self._budget.is_overdrawn(now)
        if is_overdrawn and not self._was_overdrawn:
            log.warning(
                "nvme: %s were written in the last 24 hours, more than tiers.nvme.daily_writes (%s); spills "
                "and `write: through` do not wait for it",
                about_bytes(self._budget.written(now)),
                about_bytes(self._budget.daily_bytes or 0),
            )
        self._was_overdrawn = is_overdrawn
