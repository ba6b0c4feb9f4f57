"""What commands print: data on stdout, talk on stderr, one shape for people and one for programs.

JSON is made from the wire messages field by field, all fields always there, so its names are as stable
as the .proto files (`MessageToDict` was rejected: it prints 64-bit numbers as text). Colours follow the
terminal and NO_COLOR, which rich knows about; bars of progress appear on a terminal only.
"""

import json
import math
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from google.protobuf.message import Message
from rich.console import Console, JustifyMethod
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from ...v1 import types_pb2
from ...v1.conversions import WireTiers

WIDTH = 120  # columns when stdout is no terminal


def console() -> Console:
    """Return the console for data. Made anew, because tests and pipes replace sys.stdout."""
    return Console(file=sys.stdout, highlight=False, width=None if sys.stdout.isatty() else WIDTH)


def talk() -> Console:
    """Return the console for talk: warnings, progress."""
    return Console(file=sys.stderr, highlight=False)


def new_table(*columns: str, title: str = "") -> Table:
    """Return a table without lines. A column `>name` is one of numbers; one without a name may wrap."""
    table = Table(box=None, pad_edge=False, title=title or None, title_justify="left", title_style="bold")
    for name in columns:
        justify: JustifyMethod = "right" if name.startswith(">") else "left"
        table.add_column(name.removeprefix(">"), justify=justify, no_wrap=bool(name))
    return table


def progress_bar() -> Progress:
    """Return bars of progress, gone when they end; on a terminal only."""
    return Progress(console=talk(), transient=True, disable=not sys.stderr.isatty())


def print_json(value: object) -> None:
    """Print `value` as JSON on stdout."""
    is_unicode = (sys.stdout.encoding or "").lower().startswith("utf")
    print(json.dumps(value, indent=2, ensure_ascii=not is_unicode), file=sys.stdout)


def spread(sizes: list[int], capacity: int, cells: int) -> list[int]:
    """Return how many of `cells` each size gets; what is there at all gets one, the rest stays free.

    Together they get what their sum would, or one each."""
    counts = [math.ceil(size * cells / capacity) if size else 0 for size in sizes]
    num_taken = max(math.ceil(sum(sizes) * cells / (capacity or 1)), sum(map(bool, sizes)))
    while sum(counts) > min(cells, num_taken):
        counts[counts.index(max(counts))] -= 1
    return counts


def legend(parts: Iterable[tuple[str, str, str]]) -> Text:
    """Return the line below bars: what each mark means, of parts (name, mark, style)."""
    text = Text("      ")
    for name, mark, style in parts:
        text.append(mark, style).append(f" {name}  ")
    return text


def name_of_tier(number: int, ladder: Iterable[types_pb2.TierInfo]) -> str:
    """Return the name of a tier, given by the number that a daemon with this ladder has for it."""
    tier = WireTiers.announced(ladder).tier(number)
    return str(number) if tier is None else tier.label


def plain(message: Message) -> dict[str, Any]:
    """Return a wire message as plain values: numbers as numbers, bytes in hex, enums by short name."""
    values: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if isinstance(value, Mapping):
            values[field.name] = {str(key): _plain_item(field, value[key]) for key in sorted(value)}
        elif field.is_repeated:
            values[field.name] = [_plain_item(field, item) for item in value]
        else:
            values[field.name] = _plain_item(field, value)
    return values


def _plain_item(field: Any, value: Any) -> Any:
    if isinstance(value, Message):
        return plain(value)
    if isinstance(value, bytes):
        return value.hex()
    if field.enum_type is not None:
        number = field.enum_type.values_by_number.get(value)
        return number.name.split("_", 1)[1].lower() if number else str(value)
    return value
