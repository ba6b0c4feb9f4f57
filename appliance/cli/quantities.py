"""Sizes and durations as options: one notation in every command, and an error that names the option."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from ..config.units import format_duration, parse_bytes, parse_duration

if TYPE_CHECKING:
    QuantityType = click.ParamType[Any]
else:  # generic since click 8.4
    QuantityType = click.ParamType


class Quantity(QuantityType):
    """A value with a unit. `read` parses it; its ValueError says how to write it."""

    def __init__(self, name: str, read: Callable[[str], Any]) -> None:
        self.name = name
        self._read = read

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the value read. Fails as wrong usage, saying how to write it."""
        try:
            return self._read(value) if isinstance(value, str) else value
        except ValueError as error:
            self.fail(str(error), param, ctx)


def duration(least: float = 0.0, most: float = float("inf")) -> Quantity:
    """Return the type of seconds between `least` and `most`: `30s`, `500ms`, `1h30m`; without a unit `30`."""

    def read(text: str) -> float:
        try:
            seconds = parse_duration(float(text))
        except ValueError:
            seconds = parse_duration(text)
        if not least <= seconds <= most:
            raise ValueError(f"{text!r} is not between {format_duration(least)} and {format_duration(most)}")
        return seconds

    return Quantity("duration", read)


#: Bytes: `64MiB`, `4GB`, `1048576`; and several of them: `64KiB,1MiB`.
SIZE = Quantity("size", parse_bytes)
SIZES = Quantity("size,…", lambda text: tuple(map(parse_bytes, text.split(","))))
