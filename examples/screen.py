"""What the demo prints: rows as they happen, a picture at the end.

rich draws; it knows whether stdout is a terminal, and NO_COLOR. Into a pipe the same lines go as plain text.
"""

import re
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from kvtier.appliance.cli.fleet import hosts_table
from kvtier.appliance.cli.status import picture
from kvtier.clients import Tier
from kvtier.v1 import admin_pb2

if TYPE_CHECKING:  # it imports torch, which takes seconds and wants to be prepared (demo.py)
    from kvtier.clients.transformers import Reuse

MIB = 1 << 20
PLAIN_COLUMNS = 120  # where stdout is no terminal
STYLES = {Tier.HBM: "magenta", Tier.DRAM: "cyan", Tier.NVME: "yellow"}
TIERS_CELLS = 31
HEADER = (
    f"{'session':<8}{'turn':>4}{'tokens':>8}{'reused':>8}  {'from tier':<{TIERS_CELLS}}"
    f"{'without':>8}{'load':>7}{'with':>7}{'gain':>7}  {'outputs'}"
)


class Screen:
    """Prints to stdout."""

    def __init__(self, *, is_recorded: bool = False) -> None:
        is_terminal = sys.stdout.isatty()
        width = None if is_terminal else PLAIN_COLUMNS
        self._console = Console(highlight=False, width=width, record=is_recorded)

    def save(self, path: Path, title: str) -> None:
        """Write what was printed as a picture that asks for nothing from elsewhere. It was to be recorded."""
        picture = self._console.export_svg(title=title)
        path.write_text(re.sub(r"@font-face \{.*?\}", "", picture, flags=re.S), encoding="utf-8")

    def say(self, text: str = "", style: str = "") -> None:
        """Print a paragraph."""
        self._console.print(Text(text, style))

    def title(self, text: str) -> None:
        """Print a heading, and the columns of the rows below it."""
        self._console.print(Text(f"\n{text}", "bold"))

    def header(self) -> None:
        """Print the columns of `row`."""
        self._console.print(Text(HEADER, "dim"), no_wrap=True, crop=False, overflow="ignore")

    def busy(self, text: str) -> AbstractContextManager[object]:
        """Show that something is being worked at, on a terminal only."""
        return self._console.status(text, spinner="dots")

    def row(
        self,
        session: str,
        turn: int,
        num_tokens: int,
        reuse: "Reuse",
        without_s: float,
        with_s: float,
        identical: bool,
    ) -> None:
        """Print one turn."""
        row = Text(f"{session:<8}{turn:>4}{num_tokens:>8,}{reuse.num_tokens:>8,}  ")
        tiers = _tiers(reuse)
        row.append(tiers).append(" " * (TIERS_CELLS - len(tiers)))
        row.append(f"{without_s:>8.2f}{reuse.load_s:>7.2f}{with_s:>7.2f}")
        gain = without_s / with_s
        row.append(f"{gain:>6.1f}x", "bold green" if gain > 1.2 else "")
        row.append("  identical" if identical else "  DIFFERENT", "green" if identical else "bold red")
        self._console.print(row, no_wrap=True, crop=False, overflow="ignore")

    def tiers(self, status: admin_pb2.GetStatusResponse) -> None:
        """Draw the tiers to scale, as `kvtier status` does."""
        self._console.print(picture(status, self._console.width))

    def hosts(self, status: admin_pb2.GetStatusResponse) -> None:
        """Print the hosts of a fleet as one of them sees them, as `kvtier fleet` does."""
        self._console.print(hosts_table(status))


def _tiers(reuse: "Reuse") -> Text:
    text, num_fetched = Text(), reuse.num_tokens
    for tier in sorted(reuse.tokens_by_tier):
        text.append(" + " if text else "")
        text.append(f"{reuse.tokens_by_tier[tier]:,} {tier.label}", STYLES[tier])
        num_fetched -= reuse.tokens_by_tier[tier]
    if num_fetched:
        text.append(" + " if text else "").append(f"{num_fetched:,} fetched", "green")
    return text or Text("-", "dim")
