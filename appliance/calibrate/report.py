"""The page: how many bits each head got, what quality that size costs, and what it would cost without this.

One HTML file with its pictures inside, because it has to open where nothing can be fetched. Colours are read
off a scale of one hue, dark for many bits, and every cell carries its number, so that the picture does
without colours, too.
"""

from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING

import numpy as np

from ...tiers.codecs.lossy.profile import PLANES
from ..observability.pictures import COLOURS, new_figure, svg_of
from .search import Checked

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CELL_IN = 0.42
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
    """Return the report as HTML. `tried` and `uniform` are points of the curves, in any order.

    Raises CannotDraw without matplotlib.
    """
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
        f"<h2>Bits a value, by layer and head</h2>{svg_of(heat_map(chosen))}"
        f"<h2>Quality over size</h2>{svg_of(curve(tried, uniform))}"
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


def heat_map(checked: Checked) -> "Figure":
    """Return a figure: K beside V, a row a layer, a column a head, the number of bits in each cell."""
    units = checked.allocated
    num_layers = 1 + max(unit.layer for unit in units)
    num_heads = max(unit.heads.stop for unit in units)
    figure = new_figure(1.2 + len(PLANES) * (num_heads * CELL_IN + 0.6), 1.2 + num_layers * CELL_IN)
    for plane, (axes, name) in enumerate(zip(figure.subplots(1, len(PLANES)), PLANES, strict=True)):
        axes.set_title(f"{name.upper()}: heads", loc="left", fontsize=10, fontweight="bold")
        axes.set_xticks(range(num_heads))
        axes.set_yticks(range(num_layers), [f"layer {n}" for n in range(num_layers)] if plane == 0 else [])
        axes.tick_params(length=0, top=True, labeltop=True, bottom=False, labelbottom=False, labelsize=8)
        axes.spines[:].set_visible(False)
        bits = np.full((num_layers, num_heads), np.nan)
        for unit, choice in units.items():
            if unit.plane != plane:
                continue
            held = choice.coding.bits or choice.bits
            bits[unit.layer, unit.heads] = held
            ink = "white" if held > (FEWEST_BITS + MOST_BITS) / 2 else "#222222"
            middle = unit.first_head + (unit.num_heads - 1) / 2
            axes.text(middle, unit.layer, f"{held:.2g}", ha="center", va="center", color=ink, fontsize=8)
        axes.imshow(bits, cmap="Blues", vmin=FEWEST_BITS - 1, vmax=MOST_BITS + 1, aspect="auto")
    return figure


def curve(tried: Sequence[Checked], uniform: Sequence[Checked]) -> "Figure":
    """Return a figure: ratio to the right, increase of perplexity upwards on a logarithmic scale."""
    figure = new_figure(7, 4)
    axes = figure.add_subplot()
    for name, group, style in (("calibrated", tried, "-"), ("uniform", uniform, "--")):
        ordered = sorted(group, key=lambda one: one.ratio)
        heights = [100 * max(one.quality.ppl_increase, SMALLEST_INCREASE) for one in ordered]
        colour = COLOURS[("calibrated", "uniform").index(name)]
        axes.plot([one.ratio for one in ordered], heights, style, marker="o", color=colour, label=name)
    axes.set_yscale("log")
    axes.set_xlabel("ratio")
    axes.set_ylabel("increase of perplexity, % (logarithmic)")
    axes.grid(color="#dddddd")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return figure
