"""Audit of what we depend on, without a network: what is pinned, what is installed, and under which licence.

    python -m tests.audit     (make check; exit 1 and a list when something is wrong)

Every requirement names one exact version; what is installed in this environment is that version; every
package that comes along, wanted or not, has a licence we may ship beside. What it cannot do without a
network: ask a feed whether a version has a known vulnerability (`pip-audit -r requirements.txt` does).
"""

import re
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PIN = re.compile(r"[A-Za-z0-9._-]+(\[[a-z,]+\])?==[A-Za-z0-9.+!_-]+( *; .*)?")
#: What a licence may say of itself, as a part of its text: permissive ones, and the MPL, which stays in its
#: files.
LICENCES = (
    "mit", "bsd", "apache", "psf", "python software foundation", "isc", "mpl", "mozilla public license",
    "0bsd", "unlicense", "zlib",
)  # fmt: skip
FORBIDDEN = ("agpl", "affero", "gpl-", "gnu general public", "lgpl", "sspl", "commons clause", "busl")
#: Packages that say nothing about their licence where it is looked for, with what their home says.
KNOWN = {"promql-parser": "MIT"}


def requirement_files() -> list[Path]:
    """Return every list of requirements."""
    return sorted(ROOT.glob("requirements*.txt"))


def unpinned(text: str) -> Iterator[str]:
    """Yield the lines that do not name one version."""
    for line in text.splitlines():
        wanted = line.partition(" #")[0].strip()
        if wanted and not wanted.startswith("#") and PIN.fullmatch(wanted) is None:
            yield wanted


def pins(text: str) -> dict[str, str]:
    """Return version by normalised name."""
    found = {}
    for line in text.splitlines():
        wanted = line.partition("#")[0].partition(";")[0].strip()
        if "==" in wanted:
            name, _, version = wanted.partition("==")
            found[normal(name.partition("[")[0])] = version
    return found


def normal(name: str) -> str:
    """Return the one spelling of a package's name."""
    return re.sub(r"[-_.]+", "-", name).lower()


def licence_of(package: Any) -> str:
    """Return what a package says about its licence, in lower case."""
    classifiers = [c for c in package.get_all("Classifier") or [] if c.startswith("License ::")]
    said = [package.get("License-Expression") or "", (package.get("License") or "")[:80], *classifiers]
    return " ".join(said).strip().lower()


def wrong_licence(name: str, licence: str) -> str:
    """Return what is wrong with a licence, empty when nothing is."""
    said = licence or KNOWN.get(name, "").lower()
    if not said:
        return f"{name}: says nothing about its licence; look it up and add it to KNOWN"
    alternatives = re.split(r"\bor\b|/", said)
    for alternative in alternatives:
        if any(word in alternative for word in LICENCES) and not any(w in alternative for w in FORBIDDEN):
            return ""
    return f"{name}: licence {said!r} is not one we may ship beside"


def problems() -> list[str]:
    """Return everything that is wrong, a line each."""
    found = []
    for file in requirement_files():
        found += [f"{file.name}: {line!r} names no exact version" for line in unpinned(file.read_text())]
    installed = {normal(d.metadata["Name"]): d for d in metadata.distributions()}
    for name, version in pins((ROOT / "requirements.txt").read_text()).items():
        if name not in installed:
            found.append(f"{name}: pinned and not installed; run `make test` once")
        elif installed[name].version != version:
            found.append(f"{name}: {installed[name].version} is installed, {version} pinned")
    for name, distribution in sorted(installed.items()):
        if complaint := wrong_licence(name, licence_of(distribution.metadata)):
            found.append(complaint)
    return found


def main() -> None:
    if found := problems():
        sys.exit("\n".join(found))
    print("dependencies: every version exact, every licence permissive")


if __name__ == "__main__":
    main()
