"""What a gRPC status without a detail of ours becomes."""

import pytest

from kvtier.clients.errors import KvtierError, ServerBug, Unavailable, from_status


@pytest.mark.parametrize(
    ("code", "family", "reason"),
    [
        (1, Unavailable, "CONNECTION_LOST"),  # a call that the end of a drain cut off: no bug, a miss
        (14, Unavailable, "CONNECTION_LOST"),
        (4, Unavailable, "NO_ANSWER"),
        (13, ServerBug, "UNKNOWN"),
    ],
)
def test_a_bare_status_is_told_apart(code: int, family: type[KvtierError], reason: str) -> None:
    problem = from_status(code, "words", {})
    assert (type(problem), problem.reason) == (family, reason)
