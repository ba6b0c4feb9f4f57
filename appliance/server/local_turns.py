"""Turns: which connection of the local channel is answered next.

While the channel has little to do, what arrives is answered in the wake-up that received it. Once BUDGET_S
was spent, connections wait in lanes, one for each tenant, and the event loop does other things between two
stretches of BUDGET_S. The lane that had its last turn the longest ago is next, so a lane that has just begun
to wait goes before one that floods. A turn is one frame; connections of a lane take turns, too. Nothing more
is read from a connection that waits.

Rejected: refusals of calls that waited for long, as over gRPC. What waits is bounded, since nothing more is
read; on a machine that stands still for a moment, two clients with one call each were refused.
"""

import asyncio
from collections import deque
from dataclasses import dataclass, field
from time import perf_counter
from typing import Protocol

BUDGET_S = 0.001  # what else the loop has to do waits for this and for one call


class TurnTaker(Protocol):
    """What takes turns: a LocalConnection."""

    is_waiting: bool

    @property
    def lane(self) -> str:
        """Name of the lane in which it waits."""

    def answer_next(self) -> bool:
        """Answer the next frame; return whether there may be more."""

    def flush(self) -> None:
        """Send what was answered."""

    def end_wait(self) -> None:
        """Take note that its turns are over; read again."""


@dataclass(slots=True)
class _Lane:
    """The connections of one tenant that wait."""

    connections: deque[TurnTaker] = field(default_factory=deque)
    last_turn: int = 0


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
        if not connection.is_waiting:
            connection.is_waiting = True
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
        may_have_more = connection.answer_next()
        connection.flush()
        if may_have_more:
            lane.connections.append(connection)
        else:
            connection.end_wait()
