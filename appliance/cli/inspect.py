"""`kvtier inspect`: one block, session, lease or segment in detail.

A segment can also be read from a data directory, without a daemon and without its lock: what is asked for
after a crash is exactly what no daemon can answer.
"""

import json
from pathlib import Path
from typing import Any

import click

from ...v1 import admin_pb2
from .names import parse_block
from .output import console, print_json
from .target import TIMEOUT_S, Failed, admin, json_option, resolve, target_option


@click.group()
def inspect() -> None:
    """Show one block, session, lease or segment in detail.

    \b
    Example:
      kvtier inspect block 1:5f3a9c01
      kvtier inspect session agent-42 --json
      kvtier inspect lease 17
      kvtier inspect segment 3 --data /var/lib/kvtier
    """


@inspect.command()
@click.argument("name", metavar="NAMESPACE:HASH")
@target_option
@json_option
def block(name: str, target: str | None, as_json: bool) -> None:
    """Show a block: the tiers of its fragments, its leases and pins, its price.

    HASH is the first 8 hex digits of its prefix hash, or more.

    \b
    Example:
      kvtier inspect block 1:5f3a9c01
    """
    _show(_ask(target, admin_pb2.InspectRequest(block=parse_block(name))), as_json)


@inspect.command()
@click.argument("session_id")
@target_option
@json_option
def session(session_id: str, target: str | None, as_json: bool) -> None:
    """Show a session: its urgency and the blocks it holds.

    \b
    Example:
      kvtier inspect session agent-42
    """
    _show(_ask(target, admin_pb2.InspectRequest(session_id=session_id)), as_json)


@inspect.command()
@click.argument("lease_id", type=click.IntRange(min=1))
@target_option
@json_option
def lease(lease_id: int, target: str | None, as_json: bool) -> None:
    """Show a lease: its owner, its deadline, what it pins.

    \b
    Example:
      kvtier inspect lease 17
    """
    _show(_ask(target, admin_pb2.InspectRequest(lease_id=lease_id)), as_json)


@inspect.command()
@click.argument("number", type=click.IntRange(0, (1 << 32) - 1))
@click.option(
    "--data",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Read this data directory instead of asking a daemon. Nothing in it is changed.",
)
@target_option
@json_option
def segment(number: int, data: Path | None, target: str | None, as_json: bool) -> None:
    """Show a segment of the cold store: its state, its records, its footer.

    \b
    Example:
      kvtier inspect segment 3
      kvtier inspect segment 3 --data /var/lib/kvtier --json
    """
    if data is None:
        _show(_ask(target, admin_pb2.InspectRequest(segment=number)), as_json)
        return
    from ...tiers.cold.inspection import inspect_segment  # late: only this path needs the store's parsers

    try:
        _show(inspect_segment(data, number), as_json)
    except FileNotFoundError as error:
        raise Failed(f"{data} has no segment {number}; its files are called segment-NNNNNN") from error
    except OSError as error:
        raise Failed(f"cannot read segment {number} in {data}: {error.strerror}") from error


def _ask(target: str | None, request: admin_pb2.InspectRequest) -> Any:
    with admin(resolve(target)) as stub:
        return json.loads(stub.Inspect(request, timeout=TIMEOUT_S).json)


def _show(answer: Any, as_json: bool) -> None:
    if as_json:
        print_json(answer)
    else:
        screen = console()
        for line in outline(answer):
            screen.print(line, markup=False, soft_wrap=True)


def outline(value: Any, indent: int = 0) -> list[str]:
    """Return `value` as indented lines `name  value`, names of one depth in one column."""
    pad = "  " * indent
    if isinstance(value, dict):
        width = max((len(str(key)) for key, item in value.items() if not _is_nested(item)), default=0)
        lines = []
        for key, item in value.items():
            if _is_nested(item):
                lines += [f"{pad}{key}", *outline(item, indent + 1)]
            else:
                lines.append(f"{pad}{str(key).ljust(width)}  {_word(item)}")
        return lines
    if isinstance(value, list):
        lines = []
        for item in value:
            first, *rest = outline(item, indent + 1) or [pad + "  {}"]
            lines += [f"{pad}- {first.lstrip()}", *rest]
        return lines
    return [f"{pad}{_word(value)}"]


def _is_nested(value: Any) -> bool:
    if isinstance(value, list):
        return any(isinstance(item, dict | list) for item in value)
    return isinstance(value, dict) and bool(value)


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1 else f"{value:,.3f}"
    if isinstance(value, list):
        return ", ".join(map(_word, value)) or "none"
    return "none" if value is None or value == {} else str(value)
