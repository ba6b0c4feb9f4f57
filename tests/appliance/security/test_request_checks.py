"""Checks: what a caller may send."""

import pytest

from kvtier.appliance.errors import CallerError
from kvtier.appliance.security import request_checks as checks
from kvtier.v1 import types_pb2


@pytest.mark.parametrize(
    ("tokens_per_s", "doubling_tokens", "is_right"),
    [
        (1000.0, 0.0, True),
        (1000.0, 20_000.0, True),
        (0.0, 0.0, False),
        (-1.0, 0.0, False),
        (1e300, 0.0, False),
        (float("nan"), 0.0, False),
        (1000.0, 1e-300, False),
        (1000.0, -1.0, False),
        (1000.0, float("inf"), False),
        (1000.0, float("nan"), False),
    ],
)
def test_a_stated_speed_is_one_that_prices_can_be_made_of(
    tokens_per_s: float, doubling_tokens: float, is_right: bool
) -> None:
    given = types_pb2.PrefillSpeed(tokens_per_s=tokens_per_s, doubling_tokens=doubling_tokens)
    if is_right:
        assert checks.prefill_speed(given) == (tokens_per_s, doubling_tokens)
    else:
        with pytest.raises(CallerError, match=r"prefill\.tokens_per_s must be"):
            checks.prefill_speed(given)
