"""Options of policies: numbers with a default and a range, checked when a policy is built."""

from collections.abc import Mapping
from typing import Any, NamedTuple


class Number(NamedTuple):
    """An option that is a number."""

    default: float
    lowest: float
    highest: float


class BadPolicyOption(ValueError):
    """An unknown option of a policy, or a value out of range; the message says what would be right."""


def read_numbers(policy: str, given: Mapping[str, Any], known: Mapping[str, Number]) -> dict[str, float]:
    """Return a value for every known option. Raises BadPolicyOption."""
    for name, value in given.items():
        if name not in known:
            listed = ", ".join(known) or "none"
            raise BadPolicyOption(f"policy {policy!r} has no option {name!r}; it has: {listed}")
        option = known[name]
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not option.lowest <= value <= option.highest:
            raise BadPolicyOption(
                f"{policy}.{name} must be a number from {option.lowest:g} to {option.highest:g}, is {value!r}"
            )
    return {name: float(given.get(name, option.default)) for name, option in known.items()}
