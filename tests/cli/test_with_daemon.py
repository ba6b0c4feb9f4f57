"""The commands against the real daemon: what bench measures, and that doctor finds it well."""

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvtier.appliance.cli import bench
from kvtier.appliance.config import Settings
from kvtier.appliance.host.daemon import Daemon
from kvtier.clients import Client, Geometry, NamespaceIdentity

from .conftest import run


@pytest.fixture
def daemon(target: str, tmp_path: Path) -> Iterator[str]:
    """A small daemon at `target`, on a loop of its own thread."""
    settings = {
        "listen": [target],
        "tiers": {
            "hbm": {"capacity": "64MiB"},
            "dram": {"capacity": "256MiB", "extent": "16MiB"},
            "nvme": {"path": str(tmp_path / "data"), "capacity": "1GiB"},
        },
        "observe": {"http": "off"},
    }
    ready, leave = threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        started = await Daemon.start(Settings.model_validate(settings))
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
    assert result.stderr == ""
    answer = json.loads(run("status", "--json", target=daemon).stdout)
    assert answer["num_blocks"] == 0, "what bench stored was evicted again"
    assert (answer["num_namespaces"], answer["num_sessions"]) == (2, 0)
    assert [tier["tier"] for tier in answer["tiers"]] == ["hbm", "dram", "nvme"]
    assert run("evict", "dram", "1MiB", target=daemon).exit_code == 0
    listed = json.loads(run("inspect", "namespace", "all", "--json", target=daemon).stdout)
    assert [one["namespace_id"] for one in listed] == [1, 2]
    assert "block_tokens" in run("inspect", "namespace", "1", target=daemon).stdout
    assert run("inspect", "namespace", "3", target=daemon).exit_code == 1
    missing = run("inspect", "session", "nobody", target=daemon)
    assert (missing.exit_code, missing.stdout) == (1, "")
    report = json.loads(run("doctor", "--json", target=daemon).stdout)
    verdicts = {check["name"]: check["verdict"] for check in report["checks"]}
    assert verdicts["daemon integrity"] == verdicts["daemon version"] == "ok"


def test_bench_leaves_what_others_stored_and_measures_again(daemon: str) -> None:
    geometry = Geometry(num_layers=1, num_kv_heads=2, head_dim=64, block_tokens=16, dtype="float16")
    names = [bytes([number]) * 32 for number in range(4)]
    with Client(daemon) as client:
        namespace = client.register(NamespaceIdentity(b"m" * 32, geometry))
        client.put(namespace, names, bytes(4 * geometry.block_bytes))
    for _ in range(2):
        result = run("bench", "--sizes", "64KiB", "--volume", "4MiB", "--json", target=daemon)
        assert result.exit_code == 0, result.output
        assert [figure["num_failed"] for figure in json.loads(result.stdout)["figures"]] == [0] * 4
    answer = json.loads(run("status", "--json", target=daemon).stdout)
    assert (answer["num_blocks"], answer["num_namespaces"]) == (4, 2)
    run("bench", "--sizes", "64KiB", "--volume", "4MiB", "--keep", target=daemon)
    answer = json.loads(run("status", "--json", target=daemon).stdout)
    assert (answer["num_blocks"], answer["num_namespaces"]) == (4 + 64, 2)
    evicted = run("evict", "dram", "all", "--namespace", "1", target=daemon)
    assert evicted.stdout.startswith("evicted 4 blocks, ")
    unknown = run("evict", "dram", "all", "--namespace", "9", target=daemon)
    assert (unknown.exit_code, unknown.stdout) == (1, "")
    assert "there is no namespace 9" in unknown.stderr


def test_bench_measures_the_sizes_that_a_small_volume_allows(daemon: str) -> None:
    result = run("bench", "--volume", "8MiB", "--json", target=daemon)
    assert result.exit_code == 0, result.output
    sizes = {figure["block_bytes"] for figure in json.loads(result.stdout)["figures"]}
    assert sizes == {64 << 10, 256 << 10}


def test_bench_tells_medians_so_that_an_outlier_is_one_call() -> None:
    """One call of a round takes a thousand times as long: neither the speed nor the ratio moves."""
    slow, fast = (1.0, 1000), (0.001, 1000)
    memcpy, get = bench.Rounds("memcpy"), bench.Rounds("get")
    for number in range(8):
        memcpy.add([fast] * 7 + ([slow] if number == 3 else [fast]))
        get.add([(0.002, 1000)] * 7 + [(0.002, 1000) if number else (2.0, 1000)])
    assert memcpy.speed() == pytest.approx(1e6)
    assert get.speed() == pytest.approx(0.5e6)
    assert get.ratio(memcpy.speeds) == pytest.approx(0.5)
    assert get.num_bytes == 64 * 1000


def test_bench_refuses_to_time_wrong_bytes(daemon: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "_stamp", lambda source, size, number: np.add(source, 1, out=source))
    result = run("bench", "--sizes", "64KiB", "--volume", "2MiB", target=daemon)
    assert result.exit_code == 1
    assert "not those that were put" in result.stderr


def test_bench_without_a_daemon_is_exit_code_3(target: str) -> None:
    result = run("bench", target=target)
    assert (result.exit_code, result.stdout) == (3, "")
    assert "kvtier serve" in result.stderr


def test_fleet_rank_of_a_daemon_without_a_fleet_is_itself(daemon: str) -> None:
    identity = NamespaceIdentity(
        bytes(16), Geometry(num_layers=2, num_kv_heads=1, head_dim=64, block_tokens=16, dtype="float16")
    )
    names = [bytes([number]) * 32 for number in range(3)]
    with Client(daemon) as client:
        namespace = client.register(identity)
        client.put(namespace, names[:2], np.zeros(2 * namespace.block_bytes, np.uint8))
        asked = ["fleet", "rank", str(namespace.id), *(name.hex() for name in names)]
    text = run(*asked, target=daemon).stdout
    assert "this one" in text
    assert "computing all 3 blocks" in text
    found = json.loads(run(*asked, "--queue", "10.9.9.9:1=0.5", "--json", target=daemon).stdout)
    assert [(host["address"], host["queue_s"], host["is_known"]) for host in found["hosts"]] == [
        ("10.9.9.9:1", 0.5, False)
    ]
    (own,) = json.loads(run(*asked, "--json", target=daemon).stdout)["hosts"]
    assert (own["num_held"], own["num_computed"]) == (2, 1)
    for wrong in (["abc"], [names[0].hex(), "--queue", "10.9.9.9"], ["--queue", "a=b", names[0].hex()]):
        assert run("fleet", "rank", str(namespace.id), *wrong, target=daemon).exit_code == 2
    assert "behind `rank`" in run("fleet", "--json", "rank", "1", names[0].hex(), target=daemon).stderr
    assert "UNKNOWN_NAMESPACE" in run("fleet", "rank", "99", names[0].hex(), target=daemon).stderr
