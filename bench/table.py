"""Aligned text tables, what stands in them, and how sizes and durations are written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

Number = TypeVar("Number", int, float)


def size_text(num_bytes: int) -> str:
    return f"{num_bytes >> 20} MiB" if num_bytes >= 1 << 20 else f"{num_bytes >> 10} KiB"


def milliseconds(nanoseconds: float) -> str:
    """Return milliseconds with three significant figures: 0.0026, 0.147, 31.4."""
    value = nanoseconds / 1e6
    return f"{value:.4f}" if value < 0.01 else f"{value:.3f}" if value < 10 else f"{value:.1f}"


def ratio(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.2f}×" if value < 10 else f"{value:.0f}×"


def percentile(values: Sequence[Number], share: float) -> Number:
    """Return the nearest-rank percentile; `values` must not be empty."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def render(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table: first column left, the others right; an empty row is a blank line."""
    table = [list(header), *(list(row) for row in rows)]
    widths = [max(len(row[i]) for row in table if row) for i in range(len(header))]
    lines = []
    for row in table:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=False)]
        lines.append("  ".join([row[0].ljust(widths[0]), *cells[1:]]).rstrip() if row else "")
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)
