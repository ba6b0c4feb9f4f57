"""The ledger of claims: docs/data/claims.json, one entry for each figure that a page for readers cites.

A claim is a sentence with its figures, the command that shows them, and the observation that would make it
false. Runs are a list that only grows: each has its commit, date, machine and what it showed, and the last
one counts. A claim without a run has a `source`: somebody else published it, and nothing here checks it.

A claim's figures are read out of what its command prints by a pattern each, so that a rerun compares numbers
and no one has to read tables. Claims that only a runtime's environment, a gateway or hours can show have no
patterns: `make claims` says that it did not run them.
"""

import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PATH = ROOT / "docs" / "data" / "claims.json"
#: Pages of which every figure is in the ledger.
CITING = ("README.md", "docs/status.md", "docs/comparison.md")

_UNITS = r"×|%|(?:[GMk]B|Gb|keys|lookups)/s|[mnµ]?s|lookups a second|GB/s"
_NUMBER = r"\d[\d,]*(?:\.\d+)?"
_FIGURE = re.compile(
    rf"(?<![\w.])({_NUMBER}(?:(?: to | and | / ){_NUMBER})* (?:{_UNITS}))(?![\w/])|"
    rf"(?<![\w.])(\d{{1,3}}(?:,\d{{3}})+)(?![\w,.]*\d)"
)


@dataclass(frozen=True, slots=True)
class Figure:
    """One number of a claim: `pattern` finds it in what the command prints, `take` says which of its matches.

    It has drifted when a run shows less than `low` or more than `high`.
    """

    name: str
    pattern: str
    take: str  # first, last, min, max
    low: float
    high: float

    def read(self, printed: str) -> float:
        """Return the number. Raises ValueError when nothing in `printed` matches."""
        found = [float(text.replace(",", "")) for text in re.findall(self.pattern, printed, re.M)]
        if not found:
            raise ValueError(f"{self.name}: {self.pattern!r} is not in what was printed")
        return {"first": found[0], "last": found[-1], "min": min(found), "max": max(found)}[self.take]

    def has_drifted(self, value: float) -> bool:
        """Whether a value is outside of what the claim allows."""
        return not self.low <= value <= self.high


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a claim's command. `shown` has the figures that were read, by name."""

    date: str
    commit: str
    machine: str
    shown: dict[str, float] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True, slots=True)
class Claim:
    """One line of the ledger."""

    name: str
    claim: str  # a sentence, with its figures as pages cite them
    page: str  # of docs/, with the table
    false_if: str
    command: str = ""
    minutes: int = 0  # of a rerun; 0: not by `make claims`
    needs: str = ""  # beside a checkout
    hits: str = ""  # how hits are attributed, where the claim is about hits
    source: str = ""  # of others' figures
    figures: tuple[Figure, ...] = ()
    runs: tuple[Run, ...] = ()

    def drifted(self) -> list[str]:
        """Return what the last run showed outside of what the claim allows, a phrase each."""
        shown = self.runs[-1].shown if self.runs else {}
        return [
            f"{figure.name} {shown[figure.name]:,g} (claimed {figure.low:g} to {figure.high:g})"
            for figure in self.figures
            if figure.name in shown and figure.has_drifted(shown[figure.name])
        ]


def load(path: Path = PATH) -> list[Claim]:
    """Return all claims, in the order of the file."""
    return [
        Claim(
            **{
                **entry,
                "figures": tuple(Figure(**one) for one in entry.get("figures", ())),
                "runs": tuple(Run(**one) for one in entry.get("runs", ())),
            }
        )
        for entry in json.loads(path.read_text())["claims"]
    ]


def save(claims: list[Claim], path: Path = PATH) -> None:
    """Write all claims; what is empty is left out."""
    entries = [{key: value for key, value in asdict(claim).items() if value} for claim in claims]
    path.write_text(json.dumps({"claims": entries}, indent=1, ensure_ascii=False) + "\n")


def cited(text: str) -> list[str]:
    """Return the figures of a Markdown page, as they are written: numbers with a unit of measurement or ×,
    and counts of thousands. Code and targets of links are left out."""
    for without in (r"```.*?```", r"`[^`]*`", r"\]\([^)]*\)"):
        text = re.sub(without, "", text, flags=re.S)
    return [one or other for one, other in _FIGURE.findall(text)]


def missing(text: str, claims: list[Claim]) -> list[str]:
    """Return the figures of a page that no claim's sentence has, as written there."""
    known = {figure for claim in claims for figure in cited(claim.claim)}
    return sorted(set(cited(text)) - known)
