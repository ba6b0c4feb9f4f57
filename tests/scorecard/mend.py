"""Mend: one thing that an attack on kvtier broke, and what holds it since; a class for two lists."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mend:
    """One thing that was mended. `now` is a text with figures of a run, `{by_name}`.

    `breaks` are pairs of texts in a file of the product: each alone makes a test of `tests` fail.
    """

    number: str
    what: str
    before: str
    now: str
    tests: tuple[str, ...]
    file: str
    breaks: tuple[tuple[str, str], ...]
