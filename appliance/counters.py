"""Counters by name, for the daemon and for commands that ask it, which load none of its settings."""

from collections.abc import Mapping


def of_prefix(counters: Mapping[str, int], prefix: str) -> dict[str, int]:
    """Return the counters that begin with `prefix`, by the rest of their name."""
    return {
        name.removeprefix(prefix): number
        for name, number in sorted(counters.items())
        if name.startswith(prefix)
    }
