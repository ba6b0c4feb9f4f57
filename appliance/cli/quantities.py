"""Sizes and durations as options: one notation in every command, and an error that names the option."""

from typing import TYPE_CHECKING, Any

import click

from ..config.units import format_duration, parse_bytes, parse_duration

if TYPE_CHECKING:
    BytesType = click.ParamType[int]
    ListType = click.ParamType[tuple[int, ...]]
    SecondsType = click.ParamType[float]
else:  # generic since click 8.4
    BytesType = ListType = SecondsType = click.ParamType


class Size(BytesType):
    """Bytes: `64MiB`, `4GB`, `1048576`."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return bytes. Fails as wrong usage, saying how to write it."""
        try:
            return parse_bytes(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class Sizes(ListType):
    """Several of them, with commas between: `64KiB,1MiB`."""

    name = "size,…"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        """Return bytes of each. Fails as wrong usage, saying how to write it."""
        if isinstance(value, tuple):
            return value
        return tuple(SIZE.convert(part, param, ctx) for part in value.split(","))


class Duration(SecondsType):
    """Seconds: `30s`, `500ms`, `1h30m`; a number without a unit is in seconds. Between `least` and `most`."""

    name = "duration"

    def __init__(self, least: float = 0.0, most: float = float("inf")) -> None:
        self.least = least
        self.most = most

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return seconds. Fails as wrong usage, saying how to write it."""
        try:
            seconds = parse_duration(_number_or_text(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)
        if not self.least <= seconds <= self.most:
            least, most = format_duration(self.least), format_duration(self.most)
            self.fail(f"{value!r} is not between {least} and {most}", param, ctx)
        return seconds


def _number_or_text(value: Any) -> Any:
    try:
        return float(value)
    except (TypeError, ValueError):
        return value


SIZE = Size()
SIZES = Sizes()
