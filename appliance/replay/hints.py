"""What sessions could have said: hints as a perfect harness gives them, and as a careless one does.

    clairvoyant   after each request: when the session is back, to the second, or that it has ended
    noisy         the same, off by a factor (its logarithm is normal with a deviation of 1: two thirds are
                  within 2.7 times); one end in five is not said, and one return in ten is called an end

They take the place of what a trace says of returns; what it says of decoded tokens stays. A session that the
trace does not name says nothing. The noise is drawn from a fixed seed: two policies are told the same.
"""

from dataclasses import replace
from typing import Literal

import numpy as np

from .traces import SessionHint, Trace

Hints = Literal["clairvoyant", "noisy"]
SEED = 21
UNSAID_ENDS, FALSE_ENDS = 1 / 5, 1 / 10


def with_hints(trace: Trace, kind: Hints) -> Trace:
    """Return the trace with hints of this kind after the requests of every session."""
    noise = np.random.default_rng(SEED)
    factors = np.exp(noise.standard_normal(trace.num_requests)).tolist()
    chances = noise.random(trace.num_requests).tolist()
    hints = dict(trace.hints)
    next_at: dict[str, float] = {}
    for request in reversed(range(trace.num_requests)):
        session, at = trace.sessions[request], float(trace.at[request])
        if not session:
            continue
        back_in_s = next_at.get(session, np.inf) - at
        is_end = session not in next_at
        if kind == "noisy":
            back_in_s *= factors[request]
            is_end = chances[request] >= UNSAID_ENDS if is_end else chances[request] < FALSE_ENDS
        said = hints.get(request, SessionHint())
        hints[request] = said._replace(back_in_s=float(back_in_s), is_end=is_end)
        next_at[session] = at
    return replace(trace, hints=hints)
