"""A rig of the planner with a source that collects exports."""

from typing import Any

from kvtier.appliance.core import events as ev
from kvtier.appliance.core.instructions import ExportBundle
from kvtier.appliance.core.worth import SourcePrices
from kvtier.policies.costs import PrefillModel
from kvtier.tiers.block import NamespaceIdentity

from ..rig import GEOMETRY, Rig

SIZE = 16  # blocks of a bundle
BUNDLE_BYTES = SIZE * GEOMETRY.block_bytes


class Exporting(Rig):
    """A rig with an open source that collects exports."""

    def __init__(self, share: str = "worth", num_extents: int = 64, **options: Any) -> None:
        self.exports: list[ExportBundle] = []
        super().__init__(num_extents=num_extents, share=share, **options)
        self.do(ev.SourceChanged(True))

    def do(self, event: ev.Event) -> Any:
        """Carry out an event; exports are noted."""
        instructions = super().do(event)
        self.exports += [one for one in instructions if isinstance(one, ExportBundle)]
        return instructions

    def read(self, chain: list[bytes]) -> None:
        """Acquire and release a chain."""
        call = self.acquire(chain)
        self.settle()
        self.release(call)

    def stored(self, export: ExportBundle, *, is_stored: bool = True) -> None:
        """End an export."""
        self.do(ev.ExportFinished(export.export, is_stored, BUNDLE_BYTES if is_stored else 0))

    def count(self, name: str) -> int:
        """Return a counter."""
        return self.planner.story.counters[name]


def ticked(rig: Exporting) -> None:
    """Let the planner do what it has to do at once."""
    while rig.planner.is_busy:
        rig.do(ev.Tick())


def priced(gpu_hour: float, num_reads: float, speed: float) -> SourcePrices:
    """Return prices at which a bundle of the rig pays after so many reads."""
    saved = SIZE * GEOMETRY.block_tokens / speed * gpu_hour / 3600
    return SourcePrices(thousand_puts=1000 * saved * num_reads, gpu_hour=gpu_hour)


def stated(rig: Exporting, speed: float) -> None:
    """State the speed of prefill, in tokens a second."""
    identity = NamespaceIdentity(b"m" * 16, GEOMETRY)
    rig.do(ev.NamespaceRegistered(rig.call(), identity, PrefillModel(speed, 1e12)))
