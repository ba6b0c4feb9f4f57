"""docs/claims.md, made from docs/data/claims.json."""

import re
from collections.abc import Iterator
from pathlib import Path

from .ledger import ROOT, Claim, load

PAGE = ROOT / "docs" / "claims.md"
INTRO = """# Claims

Generated from `docs/data/claims.json` by `make docs`. README, [status](status.md) and
[comparison](comparison.md) cite only figures that stand here (`tests/claims` holds them to it). Each has a
command, the commits and machines of its runs, and the observation that makes it false: run it, and say so.

`make claims` runs again what fits into an hour and was not run at this commit, and marks what drifted; each
run is written down when it ends, so the next call goes on (`ARGS="--minutes 10"` for a piece of it).
`python -m tests.claims --claim NAME` runs one. A drifted figure stays until its cause is known: on a machine
with neighbours a slow run is no proof, a wrong count is. Commits are of the tree that ran, `+` with changes
(*commit of the page*: its own was not written down). The machine is a virtual one with two cores, no GPU and
a virtual disk.
"""


def claims_page() -> Iterator[tuple[Path, bytes]]:
    """Yield docs/claims.md."""
    claims = load()
    ours = [claim for claim in claims if not claim.source]
    parts = [INTRO, _summary(ours), "\n## Measured here\n", *(_section(claim) for claim in ours)]
    parts.append("\n## Published by others\n\nNot run here.\n\n| figure | source |\n|---|---|\n")
    parts += [f"| {claim.claim} | {claim.source} |\n" for claim in claims if claim.source]
    yield PAGE, "".join(parts).encode()


def _summary(claims: list[Claim]) -> str:
    lines = ["\n| claim | last run | commit | drifted |", "|---|---|---|---|"]
    for claim in claims:
        last = claim.runs[-1]
        drift = "**yes**" if claim.drifted() else "no" if last.shown else "not compared"
        anchor = re.sub(r"[^\w -]", "", claim.name.lower()).replace(" ", "-")  # as Markdown renderers do
        lines.append(f"| [{claim.name}](#{anchor}) | {last.date[:10]} | {last.commit} | {drift} |")
    return "\n".join(lines) + "\n"


def _section(claim: Claim) -> str:
    """Return what the ledger says of one claim."""
    again = f"`make claims` runs it, {claim.minutes} minutes" if claim.minutes else "not run by `make claims`"
    lines = [
        f"\n### {claim.name}\n",
        f"{claim.claim}.\n",
        f"- **False if** {claim.false_if}.",
        f"- **Command**: `{claim.command}`; {again}{f'; needs {claim.needs}' if claim.needs else ''}.",
        f"- **Table**: [{claim.page}]({claim.page})",
    ]
    if claim.hits:
        lines.append(f"- **Hits**: {claim.hits}.")
    for run in claim.runs:
        shown = "; ".join(f"{name} {value:,g}" for name, value in run.shown.items())
        said = "; ".join(part for part in (run.machine, shown, run.note) if part)
        lines.append(f"- **Run** {run.date} at {run.commit}: {said}.")
    lines += [f"- **Drifted**: {phrase}." for phrase in claim.drifted()]
    return "\n".join(lines) + "\n"
