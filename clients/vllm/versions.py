"""Which vLLM this connector serves: the versions it was tested with, and newer ones that its hooks fit.

The connector API is declared experimental upstream and grows between minor versions. A newer version than
those listed is compared with what the connector offers when the engine starts: the names that kvtier imports
must be there, hooks must take what the engine passes, and no other hook may be demanded. If so it is served,
with a line in the log; if not dark.py takes the connector's place, and the log says why. A list alone was
rejected: vLLM releases every few weeks, and sites update when they like. What differs between the versions
is in engine.py. Versions older than those listed are not served.
"""

import inspect
import re

#: Each passes the contract tests (tests/vllm/contract); docs/integrations/vllm.md says what else it ran.
TESTED = ("0.28", "0.29", "0.30", "0.31", "0.32", "0.33")


def why_not_served(version: str, base: type, connector: type) -> str:
    """Return why a connector cannot run in vLLM `version` with base class `base`; empty when it can."""
    found, oldest = minor_of(version), minor_of(TESTED[0])
    if found is None or oldest is None or found < oldest:
        return f"vLLM {version} is older than {TESTED[0]}, the oldest that this kvtier knows"
    if is_tested(version):
        return ""
    return "; ".join(f"vLLM {version} {misfit}" for misfit in misfits(base, connector))


def is_tested(version: str) -> bool:
    """Return whether the tests ran with the minor version that `version` belongs to."""
    return ".".join(map(str, minor_of(version) or ())) in TESTED


def minor_of(version: str) -> tuple[int, int] | None:
    """Return major and minor number of a version; None when it has none."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else None


def misfits(base: type, connector: type) -> list[str]:
    """Return what the engine's `base` class demands or passes that `connector` does not offer or take."""
    found = [f"demands {name}" for name in sorted(getattr(connector, "__abstractmethods__", ()))]
    for name, ours in vars(connector).items():
        theirs = vars(base).get(name)
        if name.startswith("_") or not inspect.isfunction(ours) or not inspect.isfunction(theirs):
            continue
        wanted = [(p.name, p.kind) for p in inspect.signature(theirs).parameters.values()]
        if wanted != [(p.name, p.kind) for p in inspect.signature(ours).parameters.values()]:
            found.append(f"calls {name}({', '.join(name for name, _ in wanted)})")
    return found
