"""Chart of a fleet: for each route the tokens that were found, and the mean first token beside them."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..observability.pictures import COLOURS, new_figure
from .fleet import FleetOutcome

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def fleet_chart(title: str, outcomes: Sequence[FleetOutcome]) -> "Figure":
    """Return the figure: a bar of hits and a bar of seconds for each route, in their order."""
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
