"""Chart: hit ratio over capacity, a line per policy, a level line for what does not depend on capacity."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

from ..config.units import about_bytes
from ..observability.pictures import BOUND_COLOUR, COLOURS, DASHES, new_figure
from .outcomes import Outcome

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Point: TypeAlias = tuple[int, float, str]  # bytes, ratio, capacity as it was asked for


def hit_chart(title: str, outcomes: Sequence[Outcome]) -> "Figure":
    """Return the figure: capacity on a logarithmic axis, the legend in the order of the lines' ends."""
    lines: dict[str, list[Point]] = {}
    for outcome in outcomes:
        size = sum(outcome.capacity_bytes.values())
        lines.setdefault(outcome.policy, []).append((size, outcome.token_hit_ratio, outcome.capacity))
    num_sizes = max(len(points) for points in lines.values())
    sizes = {size: text for points in lines.values() if len(points) == num_sizes for size, _, text in points}
    figure = new_figure(9, 5)
    axes = figure.add_subplot()
    for number, (policy, points) in enumerate(lines.items()):
        is_bound = len(points) < num_sizes and len(points) == 1
        _draw(axes, number, policy, sorted(points), is_bound)
    _dress(axes, title, sizes)
    handles, labels = axes.get_legend_handles_labels()
    ends = [max(points)[1] for points in lines.values()]
    order = sorted(range(len(ends)), key=lambda number: -ends[number])
    axes.legend(
        [handles[n] for n in order],
        [labels[n] for n in order],
        loc="center left",
        bbox_to_anchor=(1.0, 0.5),
        frameon=False,
    )
    return figure


def _draw(axes: "Axes", number: int, policy: str, points: Sequence[Point], is_bound: bool) -> None:
    label = f"{policy}  {points[-1][1]:.1%}"
    if is_bound:
        axes.axhline(points[0][1], color=BOUND_COLOUR, linestyle=":", label=label)
        return
    axes.plot(
        [size for size, _, _ in points],
        [ratio for _, ratio, _ in points],
        color=COLOURS[number % len(COLOURS)],
        linestyle=DASHES[number // len(COLOURS) % len(DASHES)],
        marker="o",
        markersize=5,
        label=label,
    )


def _dress(axes: "Axes", title: str, sizes: dict[int, str]) -> None:
    axes.set_xscale("log")
    axes.set_xticks(
        sorted(sizes), [f"{sizes[size]}\n{about_bytes(size)}" for size in sorted(sizes)], minor=False
    )
    axes.set_xticks([], minor=True)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter("{x:.0%}")
    axes.grid(axis="y", color="#dddddd")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(title, loc="left", fontweight="bold")
    axes.set_xlabel("capacity (logarithmic)")
    axes.set_ylabel("prompt tokens found")
