"""The commands against the real daemon: what bench measures, and that doctor finds it well."""

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvtier.appliance.cli import bench
from kvtier.appliance.daemon import Daemon, embedded_settings

from .conftest import run


@pytest.fixture
def daemon(target: str, tmp_path: Path) -> Iterator[str]:
    """A small daemon at `target`, on a loop of its own thread."""
    ready, leave = threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        started = await Daemon.start(embedded_settings(target, tmp_path / "data"))
        ready.set()
        await leave.wait()
        await started.stop()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert ready.wait(120)
    yield target
    loop.call_soon_threadsafe(leave.set)
    thread.join()
    loop.close()


def test_bench_status_inspect_and_doctor(daemon: str) -> None:
    result = run("bench", "--sizes", "64KiB,256KiB", "--volume", "16MiB", "--json", target=daemon)
    assert result.exit_code == 0, result.output
    measured = json.loads(result.stdout)
    assert list(measured) == ["target", "transport", "seed", "figures"]
    assert [figure["operation"] for figure in measured["figures"]] == ["memcpy", "put", "get", "lookup"] * 2
    for figure in measured["figures"]:
        assert figure["num_failed"] == 0
        assert 0 < figure["p50_s"] <= figure["p99_s"]
        assert (figure["bytes_per_s"] > 0) == (figure["operation"] != "lookup")
        assert figure["operation"] != "memcpy" or figure["memcpy_ratio"] == pytest.approx(1)
    answer = json.loads(run("status", "--json", target=daemon).stdout)
    assert answer["num_blocks"] == (16 << 20) // (64 << 10) + (16 << 20) // (256 << 10)
    assert [tier["tier"] for tier in answer["tiers"]] == ["hbm", "dram", "nvme"]
    assert run("evict", "dram", "1MiB", target=daemon).exit_code == 0
    missing = run("inspect", "session", "nobody", target=daemon)
    assert (missing.exit_code, missing.stdout) == (1, "")
    report = json.loads(run("doctor", "--json", target=daemon).stdout)
    verdicts = {check["name"]: check["verdict"] for check in report["checks"]}
    assert verdicts["daemon integrity"] == verdicts["daemon version"] == "ok"


def test_bench_refuses_to_time_wrong_bytes(daemon: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "_stamp", lambda source, size, number: np.add(source, 1, out=source))
    result = run("bench", "--sizes", "64KiB", "--volume", "2MiB", target=daemon)
    assert result.exit_code == 1
    assert "not those that were put" in result.stderr


def test_bench_without_a_daemon_is_exit_code_3(target: str) -> None:
    result = run("bench", target=target)
    assert (result.exit_code, result.stdout) == (3, "")
    assert "kvtier serve" in result.stderr
