"""Admission: decides which gRPC calls are refused at once, from how long calls wait. Pure.

gRPC hands one call after the other to the event loop and keeps the rest in a queue of its own. The length of
that queue cannot be read, so it is measured as time: now and then the daemon makes a call to itself, a probe,
which waits in the same queue (queue_probe.py). Once probes have been late (MAX_DELAYS_NS) for BURST_NS, calls
are refused whenever they are, until none was for CALM_NS. A refusal costs a fifth of a lookup.

Meanwhile callers take turns. Each call belongs to a lane, one for each caller; a lane that had a turn in the
present round has the next one after NUM_CALLS_PER_TURN calls for each turn of the round. So a caller with few
calls is served while another one floods, and a flood alone is served at the rate that refusals leave.

A refusal says when to come back: refused calls of a lane are given times one after the other, as far apart as
calls of the lane can be handled, at most MAX_RETRY_NS from now. Callers that keep to them come at the rate at
which they are served.

Rejected: a limit on calls in progress (gRPC hands over a call when the one before has been handled: there are
never more than a few); a queue of our own (whether gRPC has more to hand over cannot be told from a pause, so
calls were handled one by one while two hundred waited in gRPC); counting at the proxy (it does not see TCP).
"""

from typing import Final

from ..errors import ApplianceError, error

#: Delay of a probe above which it is late, by the least number of calls beside it; any one suffices. With few
#: calls it is the machine that makes it late; more than 32 are more than one connection has in progress.
#: A standing queue settles near its bound, and a refusal waits in the same queue. Callers that were told to
#: come back later count as calls beside it: they are part of the load, and without them 33 calls in the
#: queue are a bound of 10 ms.
MAX_DELAYS_NS: Final = {33: 5_000_000, 8: 25_000_000}
BURST_NS: Final = 200_000_000  # for which a longer delay is no overload: clients that start together
CALM_NS: Final = 1_000_000_000  # after the last refusal, until a burst is tolerated again
MAX_RETRY_NS: Final = 4_000_000_000  # with 1 s, 3,000 callers came again faster than they could be refused
NUM_CALLS_PER_TURN: Final = 5  # a refusal costs a fifth of a lookup: refusals take at most half of the loop
NUM_CALLS_PER_PROBE: Final = 16
_FIRST_SERVICE_NS = 1_000_000
_LEAST_SERVICE_NS = 50_000
_LEAST_WORK = 4.0  # calls ahead of a probe, from which its delay says what one takes
_WEIGHT = 8  # of the measured service time against a new sample
_LARGEST_STEP = 4  # times the average: a pause of the whole process is no service time


class Admission:
    """Decides on calls as they come. Every method is told the time, in nanoseconds."""

    def __init__(self) -> None:
        self.service_ns = float(_FIRST_SERVICE_NS)  # that handling a call takes
        self._delay_ns = 0  # that the last probe had
        self._probed_at: int | None = None  # when the probe under way was sent
        self._num_unprobed = 0  # calls since a probe was sent
        self._num_beside = 0  # calls that came while the last probe was under way
        self._served: set[str] = set()  # lanes that had a turn in this round
        self._num_in_round = 0
        self._work = 0.0  # calls handled since the probe was sent, a refusal as the part of one that it costs
        self._late_since: int | None = None  # since when probes have taken too long
        self._sheds_until = -1
        self._returns_at: dict[str, float] = {}  # the last refused call of each lane
        self._last_return_at = 0.0  # of all lanes

    def delay_ns(self, now_ns: int) -> int:
        """Return how long a call waits for the event loop, as far as it is known."""
        return max(self._delay_ns, 0 if self._probed_at is None else now_ns - self._probed_at)

    def admit(self, lane: str, deadline_ns: float, now_ns: int) -> None:
        """Count a call. Raises BusyError when it is refused."""
        self._num_unprobed += 1
        self._work += 1
        if not self._is_overloaded(now_ns):
            return
        if now_ns + self.service_ns > deadline_ns:
            raise self.refusal(lane, "calls wait, and the deadline would pass; call again as told", now_ns)
        self._num_in_round += 1
        if lane in self._served:
            if self._num_in_round < NUM_CALLS_PER_TURN * len(self._served):
                raise self.refusal(lane, "too many calls wait; call again as told", now_ns)
            self._served.clear()
            self._num_in_round = 0
        self._served.add(lane)

    def refusal(self, lane: str, message: str, now_ns: int) -> ApplianceError:
        """Return a refusal that says when to come back."""
        self._work -= 1 - 1 / NUM_CALLS_PER_TURN
        first_ns = max(self._returns_at.get(lane, 0.0), now_ns + self.delay_ns(now_ns))
        # Every other call of a lane is one that was refused before: callers that were served come again, too.
        at_ns = first_ns + 2 * self.service_ns * max(1, len(self._served))
        self._returns_at[lane] = at_ns = min(at_ns, now_ns + MAX_RETRY_NS)
        self._last_return_at = max(self._last_return_at, at_ns)
        return error("TOO_MANY_IN_FLIGHT", message, retry_after_s=(at_ns - now_ns) / 1e9)

    # ---------------------------------------------------------------------------------- probes

    def begin_probe(self, now_ns: int) -> bool:
        """Return whether a probe is due, which is then under way: after some calls or a late probe."""
        is_due = self._num_unprobed >= NUM_CALLS_PER_PROBE or self._delay_ns > min(MAX_DELAYS_NS.values())
        if self._probed_at is not None or not is_due:
            return False
        self._probed_at = now_ns
        self._num_unprobed = 0
        self._work = 0.0
        return True

    def end_probe(self, now_ns: int, has_arrived: bool = True) -> None:
        """Take the delay of the probe under way; one that got lost says nothing."""
        if self._probed_at is None:
            return
        self._delay_ns, self._num_beside = now_ns - self._probed_at if has_arrived else 0, self._num_unprobed
        if not self._is_late(self._delay_ns, self._num_beside, now_ns):
            self._late_since = None
        elif self._late_since is None:
            self._late_since = self._probed_at
        self._probed_at = None
        if has_arrived and self._work >= _LEAST_WORK:
            sample_ns = min(self._delay_ns / self._work, _LARGEST_STEP * self.service_ns)
            average_ns = self.service_ns + (sample_ns - self.service_ns) / _WEIGHT
            self.service_ns = max(average_ns, _LEAST_SERVICE_NS)

    # --------------------------------------------------------------------------------- private

    def _is_overloaded(self, now_ns: int) -> bool:
        """Return whether calls are to be refused now."""
        if not self._is_late(self.delay_ns(now_ns), max(self._num_beside, self._num_unprobed), now_ns):
            if now_ns > self._sheds_until and self._served:
                self._served.clear()
                self._returns_at.clear()
                self._num_in_round = 0
            return False
        late_since = self._probed_at if self._late_since is None else self._late_since
        if now_ns > self._sheds_until and (late_since is None or now_ns - late_since < BURST_NS):
            return False
        self._sheds_until = now_ns + CALM_NS
        return True

    def _is_late(self, delay_ns: int, num_beside: int, now_ns: int) -> bool:
        """Return whether a probe with so many calls beside it was late because of them."""
        num_away = (self._last_return_at - now_ns) / (2 * self.service_ns * max(1, len(self._served)))
        num_calls = num_beside + max(0.0, num_away) if num_beside >= min(MAX_DELAYS_NS) else num_beside
        return any(num_calls >= least and delay_ns > max_ns for least, max_ns in MAX_DELAYS_NS.items())
