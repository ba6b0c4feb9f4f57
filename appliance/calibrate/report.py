"""The page: how many bits each head got, what quality that size costs, and what it would cost without this.

One HTML file with pictures in SVG, drawn here: it has to open where nothing can be fetched, and a plotting
library is larger than the daemon. Colours are read off a scale of one hue, dark for many bits, and every
cell carries its number, so that the picture does without colours, too.
"""

import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from ...tiers.codecs.profile import PLANES
from .allocation import Choice
from .coding import Coding, Unit
from .search import Checked

CELL, GAP, LEFT, TOP = 34, 40, 64, 48
WIDTH, HEIGHT, MARGIN = 620, 340, 56
FEWEST_BITS, MOST_BITS = 2, 8
SMALLEST_INCREASE = 1e-5  # where the logarithmic axis ends
_STYLE = (
    "body{margin:32px auto;max-width:980px;font:15px/1.5 system-ui,sans-serif;color:#222}"
    "table{border-collapse:collapse}td,th{padding:3px 14px 3px 0;text-align:right}"
    "th{border-bottom:1px solid #999;font-weight:600}td:first-child,th:first-child{text-align:left}"
)


def page(
    title: str,
    facts: Mapping[str, str],
    chosen: Checked,
    tried: Sequence[Checked],
    uniform: Sequence[Checked],
) -> str:
    """Return the report as HTML. `tried` and `uniform` are points of the curves, in any order."""
    listed = "".join(
        f"<tr><td>{escape(name)}</td><td>{escape(text)}</td></tr>" for name, text in facts.items()
    )
    rows = "".join(
        _row(name, one)
        for name, group in (("calibrated", tried), ("uniform", uniform))
        for one in sorted(group, key=lambda one: one.stored_bits)
    )
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style><body><h1>{escape(title)}</h1><table>{listed}</table>"
        f"<h2>Bits a value, by layer and head</h2>{heat_map(chosen)}"
        f"<h2>Quality over size</h2>{curve(tried, uniform)}"
        "<table><tr><th>allocation<th>ratio<th>bits<th>perplexity<th>±<th>KL<th>first choice changed"
        f"<th>attention error</tr>{rows}</table></html>\n"
    )


def _row(name: str, one: Checked) -> str:
    quality = one.quality
    cells = (
        name,
        f"{one.ratio:.2f}×",
        f"{one.stored_bits:.2f}",
        f"{100 * quality.ppl_increase:+.3f} %",
        f"{100 * quality.nll_error:.3f}",
        f"{quality.kl:.2e}",
        f"{100 * quality.flips:.2f} %",
        f"{100 * quality.attention_error:.2f} %",
    )
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def heat_map(checked: Checked) -> str:
    """Return an SVG: K beside V, a row a layer, a column a head, the number of bits in each cell."""
    units = checked.allocated
    num_layers = 1 + max(unit.layer for unit in units)
    num_heads = max(unit.heads.stop for unit in units)
    panel = num_heads * CELL + GAP
    width, height = LEFT + len(PLANES) * panel, TOP + num_layers * CELL + 12
    parts = [_open(width, height)]
    for plane, name in enumerate(PLANES):
        left = LEFT + plane * panel
        parts.append(_text(left, 18, f"{name.upper()}: heads", weight=600))
        parts += [
            _text(left + head * CELL + CELL / 2, TOP - 8, str(head), "middle") for head in range(num_heads)
        ]
    for layer in range(num_layers):
        parts.append(_text(LEFT - 10, TOP + layer * CELL + CELL / 2 + 4, f"layer {layer}", "end"))
    for unit, choice in units.items():
        parts.append(_cell(unit, LEFT + unit.plane * panel, choice))
    return "".join(parts) + "</svg>"


def _cell(unit: Unit, left: float, choice: Choice[Coding]) -> str:
    x, y, width = left + unit.first_head * CELL, TOP + unit.layer * CELL, CELL * unit.num_heads
    bits = choice.coding.bits or choice.bits
    number, title = f"{bits:.2g}", f"{unit}: {choice.coding}, {choice.bits:.2f} bits with scales"
    shade = min(1.0, max(0.0, (bits - FEWEST_BITS) / (MOST_BITS - FEWEST_BITS)))
    light = 94 - 58 * shade
    ink = "#fff" if shade > 0.55 else "#222"
    return (
        f'<g><title>{escape(title)}</title><rect x="{x}" y="{y}" width="{width - 2}" height="{CELL - 2}" '
        f'rx="3" fill="hsl(207 70% {light:.0f}%)"/>'
        f"{_text(x + width / 2 - 1, y + CELL / 2 + 4, number, 'middle', ink)}</g>"
    )


def curve(tried: Sequence[Checked], uniform: Sequence[Checked]) -> str:
    """Return an SVG: ratio to the right, increase of perplexity upwards on a logarithmic scale."""
    points = [*tried, *uniform]
    lowest, highest = min(one.ratio for one in points), max(one.ratio for one in points)
    decades = [math.log10(_height(one)) for one in points]
    bottom, top = math.floor(min(decades)), math.ceil(max(decades) + 1e-9)

    def place(one: Checked) -> tuple[float, float]:
        across = (one.ratio - lowest) / (highest - lowest or 1)
        up = (math.log10(_height(one)) - bottom) / (top - bottom or 1)
        return MARGIN + 20 + across * (WIDTH - 2 * MARGIN - 120), HEIGHT - MARGIN - up * (HEIGHT - 2 * MARGIN)

    parts = [
        _open(WIDTH, HEIGHT),
        _text(MARGIN, 22, "increase of perplexity (logarithmic), by ratio", weight=600),
    ]
    for decade in range(bottom, top + 1):
        y = HEIGHT - MARGIN - (decade - bottom) / (top - bottom or 1) * (HEIGHT - 2 * MARGIN)
        parts.append(f'<path d="M{MARGIN} {y:.1f}H{WIDTH - MARGIN}" stroke="#ddd"/>')
        parts.append(_text(MARGIN - 6, y + 4, f"{100 * 10.0**decade:g} %", "end"))
    for name, group, colour, dash in (
        ("calibrated", tried, "#0072B2", ""),
        ("uniform", uniform, "#D55E00", "6 4"),
    ):
        ordered = sorted(group, key=lambda one: one.ratio)
        if not ordered:
            continue
        places = [place(one) for one in ordered]
        line = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        parts.append(
            f'<path d="M{line}" fill="none" stroke="{colour}" stroke-dasharray="{dash}" stroke-width="2"/>'
        )
        for (x, y), one in zip(places, ordered, strict=True):
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>')
            parts.append(_text(x, HEIGHT - MARGIN + 18, f"{one.ratio:.1f}×", "middle", "#888", size=10))
        parts.append(_text(places[-1][0] + 9, places[-1][1] + 4, name, ink=colour))
    return "".join(parts) + "</svg>"


def _height(one: Checked) -> float:
    return max(one.quality.ppl_increase, SMALLEST_INCREASE)


def _open(width: float, height: float) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="system-ui,sans-serif" font-size="13">'
    )


def _text(
    x: float, y: float, text: str, anchor: str = "start", ink: str = "#222", weight: int = 400, size: int = 13
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{ink}" font-weight="{weight}" '
        f'font-size="{size}">{escape(text)}</text>'
    )


def write_page(path: Path, text: str) -> None:
    """Write the report. Raises OSError."""
    path.write_text(text, "utf-8")
