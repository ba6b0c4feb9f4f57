"""Mend: one thing that an attack tries, and the tests that hold kvtier's answer to it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mend:
    """One attack. `answer` is what happens then, a text with figures of a run, `{by_name}`.

    `breaks` are pairs of texts in a file of the product: each alone makes a test of `tests` fail.
    """

    number: str
    attack: str
    answer: str
    tests: tuple[str, ...]
    file: str
    breaks: tuple[tuple[str, str], ...]
