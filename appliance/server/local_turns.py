"""Turns: which connection of the local channel is answered next, and which calls are refused meanwhile.

While the channel has little to do, what arrives is answered in the wake-up that received it. Once BUDGET_S
was spent, connections wait in lanes, one for each tenant, and the event loop does other things between two
stretches of BUDGET_S. The lane that had its last turn the longest ago is next, so a lane that has just begun
to wait goes before one that floods. A turn is one frame; connections of a lane take turns, too. Nothing more
is read from a connection that waits.

A connection that waits for longer than `admission.MAX_DELAY_NS`, in a lane in which that has gone on for
`admission.BURST_NS`, has calls refused, except those that give something back: of NUM_CALLS_PER_TURN turns of
its lane one is answered, as over gRPC. A refusal says to come back after as long as the connection waited.
"""

import asyncio
from collections import deque
from dataclasses import dataclass, field
from time import perf_counter, perf_counter_ns
from typing import Protocol

from ..errors import ApplianceError, error
from . import admission

BUDGET_S = 0.002  # what else the loop has to do waits for this and for one call


class TurnTaker(Protocol):
    """What takes turns: a LocalConnection."""

    waits_since_ns: int | None

    @property
    def lane(self) -> str:
        """Name of the lane in which it waits."""

    def answer_next(self, refusal: ApplianceError | None = None) -> bool:
        """Answer the next frame, with `refusal` if it may be refused; return whether there may be more."""

    def flush(self) -> None:
        """Send what was answered."""

    def end_wait(self) -> None:
        """Take note that its turns are over; read again."""


@dataclass(slots=True)
class _Lane:
    """The connections of one tenant that wait."""

    connections: deque[TurnTaker] = field(default_factory=deque)
    last_turn: int = 0
    late_since_ns: int | None = None
    num_late: int = 0  # turns since then

    def refusal(self, waits_since_ns: int, now_ns: int) -> ApplianceError | None:
        """Return what the next call is refused with, None when it is to be answered."""
        delay_ns = now_ns - waits_since_ns
        if delay_ns <= admission.MAX_DELAY_NS:
            self.late_since_ns = None
            return None
        if self.late_since_ns is None:
            self.late_since_ns, self.num_late = waits_since_ns, 0
        if now_ns - self.late_since_ns < admission.BURST_NS:
            return None
        self.num_late += 1
        if self.num_late % admission.NUM_CALLS_PER_TURN == 0:
            return None
        after_s = min(delay_ns, admission.MAX_RETRY_NS) / 1e9
        return error("TOO_MANY_IN_FLIGHT", "too many calls wait; call again as told", retry_after_s=after_s)


class Turns:
    """Divides the event loop's time among connections. Lives on the event loop."""

    def __init__(self) -> None:
        self._lanes: dict[str, _Lane] = {}  # those that had a turn, or wait for one, since none waited
        self._spent_s = 0.0  # since the loop was left to others
        self._is_scheduled = False
        self._turn = 0

    def serve(self, connection: TurnTaker) -> None:
        """Answer what arrived whole: now, or in turn where others wait or much was done already."""
        if self._is_scheduled:
            self._wait(connection)
            return
        began_at = perf_counter()
        ends_at = began_at + BUDGET_S - self._spent_s
        while (may_have_more := connection.answer_next()) and perf_counter() < ends_at:
            pass
        connection.flush()
        self._spent_s += perf_counter() - began_at
        if may_have_more or self._spent_s >= BUDGET_S:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._go_on)
            if may_have_more:
                self._wait(connection)

    def _wait(self, connection: TurnTaker) -> None:
        if connection.waits_since_ns is None:
            connection.waits_since_ns = perf_counter_ns()
            self._lanes.setdefault(connection.lane, _Lane()).connections.append(connection)

    def _go_on(self) -> None:
        """Give turns for BUDGET_S, then leave the loop to others."""
        began_at = perf_counter()
        while waiting := [lane for lane in self._lanes.values() if lane.connections]:
            self._give_turn(min(waiting, key=lambda lane: lane.last_turn))
            if perf_counter() - began_at >= BUDGET_S:
                asyncio.get_running_loop().call_soon(self._go_on)
                return
        self._lanes.clear()
        self._is_scheduled = False
        self._spent_s = 0.0

    def _give_turn(self, lane: _Lane) -> None:
        self._turn += 1
        lane.last_turn = self._turn
        connection = lane.connections.popleft()
        assert connection.waits_since_ns is not None
        may_have_more = connection.answer_next(lane.refusal(connection.waits_since_ns, perf_counter_ns()))
        connection.flush()
        if may_have_more:
            lane.connections.append(connection)
        else:
            connection.end_wait()
