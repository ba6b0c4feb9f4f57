"""Where and how figures were taken: a figure without this is a rumour."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def _field(path: str, name: str) -> str:
    """Return the value of the first `name: value` line in a /proc file; empty when there is none."""
    for line in Path(path).read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""


def _shared_cache() -> str:
    caches = sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"))
    return caches[-1].read_text().strip() if caches else "unknown"


def _commit() -> str:
    """Return the commit of the checkout, with `+` when there are changes; empty outside of one."""
    try:
        command = ["git", "describe", "--always", "--dirty=+", "--abbrev=10"]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def _version() -> str:
    """Return the installed version; a checkout that is not installed has its commit only."""
    try:
        return version("kvtier")
    except PackageNotFoundError:
        return "not installed"


def _command() -> str:
    """Return the command that runs, as it is written in a checkout."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    module = spec.name.removesuffix(".__main__") if spec else "bench"
    return shlex.join(["python", "-m", module, *sys.argv[1:]])


def describe(peers: dict[str, str]) -> dict[str, str]:
    """Return label -> value of machine, date, versions and command. `peers` maps each peer to its version."""
    memory_kib = int(_field("/proc/meminfo", "MemTotal").split()[0])
    model, huge = _field("/proc/cpuinfo", "model name"), _field("/proc/meminfo", "HugePages_Free")
    load = " ".join(f"{value:.1f}" for value in os.getloadavg())
    versions = {"kvtier": f"{_version()} {_commit()}".strip(), **peers}
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": f"{model}, {os.cpu_count()} cores, last cache {_shared_cache()}",
        "memory": f"{memory_kib / (1 << 20):.0f} GiB, huge pages free {huge}",
        "kernel": platform.release(),
        "load": f"{load} before the first measurement",
        "python": platform.python_version(),
        "versions": ", ".join(f"{name} {number}" for name, number in versions.items()),
        "command": _command(),
    }


def print_machine(peers: dict[str, str] | None = None, **more: str) -> dict[str, str]:
    """Print what `describe` says and `more`, a line each; return both."""
    machine = describe(peers or {}) | more
    print("\n".join(f"{label:9}{value}" for label, value in machine.items()), flush=True)
    return machine


def write_report(path: Path | None, **parts: Any) -> None:
    """Write the parts of a report as JSON, where a file was named."""
    if path is not None:
        path.write_text(json.dumps(parts, indent=1) + "\n")


def finish(report: dict[str, Any], failures: list[str], as_json: bool) -> int:
    """Print a report, as JSON or a line a value, and the first failures; return the exit status."""
    print(
        json.dumps(report) if as_json else "\n".join(f"  {name:26} {value}" for name, value in report.items())
    )
    for failure in failures[:20]:
        print(f"  {failure}", file=sys.stderr)
    return int(bool(failures))
