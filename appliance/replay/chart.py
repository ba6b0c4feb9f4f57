"""Chart: hit ratio over capacity, a line per policy, as one self-contained HTML page with an SVG in it.

Written by ourselves, because it is forty lines: a plotting library is a hundred megabytes for a picture of
a dozen points, and pages that load scripts from elsewhere cannot be opened where production traces are.
"""

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TypeAlias

from ..units import about_bytes
from .outcomes import Outcome

WIDTH, HEIGHT = 860, 480
LEFT, RIGHT, TOP, BOTTOM = 64, 190, 56, 56
#: Okabe and Ito's colours, which people with any colour vision can tell apart; dashes for those who print.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8B6D2E")
DASHES = ("", "7 4", "2 3", "9 3 2 3")
BOUND_COLOUR, BOUND_DASH = "#777777", "1 4"
LABEL_GAP = 15

Point: TypeAlias = tuple[int, float, str]  # bytes, ratio, capacity as it was asked for


def write_chart(path: Path, title: str, outcomes: Sequence[Outcome]) -> None:
    """Write the page. `.svg` writes the picture alone. Raises OSError."""
    picture = svg(title, outcomes)
    if path.suffix == ".svg":
        path.write_text(picture, encoding="utf-8")
        return
    path.write_text(
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<body style="margin:24px;font-family:system-ui,sans-serif">{picture}</body></html>\n',
        encoding="utf-8",
    )


def svg(title: str, outcomes: Sequence[Outcome]) -> str:
    """Return the picture. Capacity is on a logarithmic axis; policies stand beside the end of their line."""
    lines: dict[str, list[Point]] = {}
    for outcome in outcomes:
        size = sum(outcome.capacity_bytes.values())
        lines.setdefault(outcome.policy, []).append((size, outcome.token_hit_ratio, outcome.capacity))
    lengths = {policy: len(points) for policy, points in lines.items()}
    sizes = {
        size: text
        for policy, points in lines.items()
        for size, _, text in points
        if lengths[policy] == max(lengths.values())
    }
    scale = _Scale(min(sizes), max(sizes), max(ratio for points in lines.values() for _, ratio, _ in points))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
        f'height="{HEIGHT}" font-family="system-ui,sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="26" font-size="16" font-weight="600">{escape(title)}</text>',
        f'<text x="{LEFT}" y="44" fill="#666">prompt tokens found, by capacity (logarithmic)</text>',
        *_axes(scale, sizes),
    ]
    ends = []
    for number, (policy, points) in enumerate(lines.items()):
        points.sort()
        is_bound = len(points) == 1 and len(sizes) > 1  # the same at any capacity: a line across
        if is_bound:
            points = [(size, points[0][1], policy) for size in (min(sizes), max(sizes))]
        colour, dash = COLOURS[number % len(COLOURS)], DASHES[number // len(COLOURS) % len(DASHES)]
        if is_bound:
            colour, dash = BOUND_COLOUR, BOUND_DASH
        parts += _line(scale, policy, points, colour, dash, with_marks=not is_bound)
        size, ratio, _ = points[-1]
        ends.append((scale.y(ratio), scale.x(size), f"{policy}  {ratio:.1%}", colour))
    return "\n".join([*parts, *_labels(ends), "</svg>"])


class _Scale:
    """From bytes and ratios to pixels."""

    def __init__(self, smallest: int, largest: int, highest: float) -> None:
        self.low, self.high = math.log(smallest), math.log(largest)
        self.step = next(step for step in (0.01, 0.02, 0.05, 0.1, 0.2) if highest / step <= 8 or step == 0.2)
        self.top = max(1, math.ceil(highest / self.step - 1e-9)) * self.step

    def x(self, size: int) -> float:
        share = (math.log(size) - self.low) / (self.high - self.low) if self.high > self.low else 0.5
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(self, ratio: float) -> float:
        return HEIGHT - BOTTOM - ratio / self.top * (HEIGHT - TOP - BOTTOM)


def _line(
    scale: _Scale, policy: str, points: Sequence[Point], colour: str, dash: str, with_marks: bool
) -> list[str]:
    path = " ".join(f"{scale.x(size):.1f},{scale.y(ratio):.1f}" for size, ratio, _ in points)
    style = f'fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}"'
    parts = [f'<polyline points="{path}" {style}/>']
    for size, ratio, text in points if with_marks else ():
        words = escape(f"{policy}, {text}: {ratio:.2%}")
        place = f'cx="{scale.x(size):.1f}" cy="{scale.y(ratio):.1f}"'
        parts.append(f'<circle {place} r="3.5" fill="{colour}"><title>{words}</title></circle>')
    return parts


def _axes(scale: _Scale, sizes: dict[int, str]) -> list[str]:
    parts = []
    for number in range(round(scale.top / scale.step) + 1):
        ratio = number * scale.step
        y = scale.y(ratio)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end" fill="#444">{ratio:.0%}</text>')
    last_x = -math.inf
    for size, text in sorted(sizes.items()):
        x = scale.x(size)
        if x - last_x < 40:
            continue
        last_x = x
        y = HEIGHT - BOTTOM
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y}" y2="{y + 5}" stroke="#444"/>')
        parts.append(f'<text x="{x:.1f}" y="{y + 20}" text-anchor="middle" fill="#444">{escape(text)}</text>')
        style = 'text-anchor="middle" fill="#888" font-size="11"'
        parts.append(f'<text x="{x:.1f}" y="{y + 36}" {style}>{about_bytes(size)}</text>')
    return parts


def _labels(ends: list[tuple[float, float, str, str]]) -> list[str]:
    """Return the policies' names beside their lines' ends, moved apart where they would overlap."""
    parts, floor = [], -math.inf
    lowest = HEIGHT - BOTTOM
    ordered = sorted(ends)
    overflow = max(0.0, len(ordered) * LABEL_GAP - (lowest - ordered[0][0])) if ordered else 0.0
    for y, x, text, colour in ordered:
        floor = max(y - overflow, floor + LABEL_GAP)
        parts.append(f'<text x="{x + 10:.1f}" y="{floor + 4:.1f}" fill="{colour}">{escape(text)}</text>')
    return parts
