"""Charts of replays: hit ratio over capacity, and what routes make of a fleet."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

from ..config.units import about_bytes
from ..observability.pictures import BOUND_COLOUR, COLOURS, DASHES, new_figure
from .outcomes import Outcome

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from .fleet import FleetOutcome

Point: TypeAlias = tuple[int, float, str]  # bytes, ratio, capacity as it was asked for


def hit_chart(title: str, outcomes: Sequence[Outcome]) -> "Figure":
    """Return hit ratios over capacity, a line per policy, level for what does not depend on capacity.

    The capacity's axis is logarithmic, the legend in the order of the lines' ends."""
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


def fleet_chart(title: str, outcomes: "Sequence[FleetOutcome]") -> "Figure":
    """Return for each route, in their order, a bar of tokens found and one of the mean first token."""
    figure = new_figure(9, 1.2 + 0.55 * len(outcomes))
    hits, times = figure.subplots(1, 2, sharey=True)
    labels = [f"{one.route}, {one.num_hosts} hosts{', store' * one.has_store}" for one in outcomes]
    own = [100 * one.own_hit_ratio for one in outcomes]
    hits.barh(labels, own, color=COLOURS[0], label="own memory")
    other = [100 * one.fetched_ratio for one in outcomes]
    hits.barh(labels, other, left=own, color=COLOURS[5], label="other hosts")
    if any(stored := [100 * one.stored_ratio for one in outcomes]):
        ends = [a + b for a, b in zip(own, other, strict=True)]
        hits.barh(labels, stored, left=ends, color=COLOURS[2], label="store")
    hits.set_xlabel("tokens found, %")
    hits.legend(loc="lower right", frameon=False)
    mean_s = [one.ttft_s["mean"] for one in outcomes]
    bars = times.barh(labels, mean_s, color=COLOURS[1])
    times.bar_label(bars, [f"{seconds:.3g} s" for seconds in mean_s], padding=3)
    times.set_xscale("log")
    times.margins(x=0.2)
    times.set_xlabel("mean time to first token, s, queues included")
    hits.invert_yaxis()
    figure.suptitle(title)
    return figure
