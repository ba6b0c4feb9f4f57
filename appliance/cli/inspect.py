"""`kvtier inspect`: one block, session, lease, segment or namespace in detail.

A segment can also be read from a data directory, without a daemon and without its lock: what is asked for
after a crash is exactly what no daemon can answer.
"""

import json
from pathlib import Path
from typing import Any

import click

from ...v1 import admin_pb2
from .names import name_subject
from .output import console, print_json
from .target import TIMEOUT_S, Failed, admin, json_option, resolve, target_option


@click.command()
@click.argument("kind", type=click.Choice(["block", "session", "lease", "segment", "namespace"]))
@click.argument("name")
@click.option(
    "--data",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Read a segment in this data directory instead of asking a daemon. Nothing in it is changed.",
)
@target_option
@json_option
def inspect(kind: str, name: str, data: Path | None, target: str | None, as_json: bool) -> None:
    """Show one block, session, lease, segment or namespace in detail.

    NAME is NAMESPACE:HASH for a block, with the first 8 hex digits of its prefix hash or more; the id of a
    session or a lease; the number of a segment; the number of a namespace, or `all` of them. Shown are tiers,
    pins, uses and leases of a block; urgency and blocks of a session; owner, deadline and pins of a lease;
    state, records and footer of a segment; tenant, digest and geometry of a namespace.

    \b
    Example:
      kvtier inspect block 1:5f3a9c01
      kvtier inspect session agent-42 --json
      kvtier inspect lease 17
      kvtier inspect segment 3 --data /var/lib/kvtier/cold
      kvtier inspect namespace all
    """
    if data is not None and kind != "segment":
        raise click.UsageError("--data goes with a segment; of anything else only the daemon knows")
    request = admin_pb2.InspectRequest()
    if kind == "lease":
        request.lease_id = _number(name, 1, (1 << 63) - 1)
    elif kind == "namespace":
        request.namespace_id = 0 if name == "all" else _number(name, 1, (1 << 32) - 1)
    elif kind == "segment":
        request.segment = _number(name, 0, (1 << 32) - 1)
    else:
        name_subject(request, kind, name)
    if data is not None:
        print_outline(_read_segment(data, request.segment), as_json)
        return
    with admin(resolve(target)) as stub:
        answer = stub.Inspect(request, timeout=TIMEOUT_S)
    print_outline(json.loads(answer.json), as_json)


def _number(text: Any, least: int, most: int) -> int:
    """Return the number that `text` is. Raises UsageError."""
    return click.IntRange(least, most).convert(text, None, None)


def _read_segment(data: Path, number: int) -> Any:
    """Return what a segment holds, as a daemon would say it. Raises Failed."""
    from ...tiers.cold.inspection import inspect_segment  # late: only this path needs the store's parsers

    try:
        return inspect_segment(data, number)
    except FileNotFoundError as error:
        raise Failed(f"{data} has no segment {number}; its files are called segment-NNNNNN") from error
    except OSError as error:
        raise Failed(f"cannot read segment {number} in {data}: {error.strerror}") from error


def print_outline(answer: Any, as_json: bool) -> None:
    """Print plain values as JSON, or as an outline."""
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
