"""LMCache's real engine over kvtier: another process hits, and nothing the daemon does reaches the engine."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ..daemon import Daemon

WHY = "lmcache is not installed; `make test-lmcache` runs this"
lmcache = pytest.importorskip("lmcache", reason=WHY)

from lmcache.v1.storage_backend.connector.base_connector import RemoteConnector  # noqa: E402

from kvtier.clients.lmcache import KvtierConnector  # noqa: E402

from ..waiting import until  # noqa: E402
from .engine import CHUNK_BYTES, CHUNK_TOKENS, Engine, prompt  # noqa: E402

WAIT_S = 60.0
NUM_TOKENS = 5 * CHUNK_TOKENS + 7


def stored(engine: Engine, tokens: list[int], num_tokens: int) -> None:
    engine.store(tokens)
    until(lambda: engine.lookup(tokens) == num_tokens)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """One daemon for the tests that leave it alive."""
    with Daemon(tmp_path_factory.mktemp("daemon"), settings=("tiers.dram.capacity=64MiB",)) as running:
        yield running


def test_it_is_lmcaches_connector() -> None:
    assert issubclass(KvtierConnector, RemoteConnector)
    assert not getattr(KvtierConnector, "__abstractmethods__", None)


def test_another_process_hits(shared: Daemon) -> None:
    tokens = prompt(NUM_TOKENS)
    with Engine(shared.target) as engine:
        assert engine.lookup(tokens) == 0
        stored(engine, tokens, 5 * CHUNK_TOKENS)
        assert engine.retrieve(tokens) == (5 * CHUNK_TOKENS, True)
        longer = tokens[: 3 * CHUNK_TOKENS] + prompt(90, seed=2)
        assert engine.retrieve(longer) == (3 * CHUNK_TOKENS, True)
        assert engine.remote.guard.causes == {}
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(root)])}
    command = [sys.executable, "-m", "tests.lmcache.engine", shared.target, str(NUM_TOKENS)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == [5 * CHUNK_TOKENS, 5 * CHUNK_TOKENS, True]


def test_chunks_shorter_than_a_chunk_are_not_kept(shared: Daemon) -> None:
    tokens = prompt(NUM_TOKENS, seed=3)
    with Engine(shared.target, save_unfull_chunk=True) as engine:
        stored(engine, tokens, 5 * CHUNK_TOKENS)
        until(lambda: engine.remote.guard.causes == {"PARTIAL_CHUNK": 1})
        assert engine.retrieve(tokens) == (5 * CHUNK_TOKENS, True)


def test_models_of_another_name_share_nothing(shared: Daemon) -> None:
    tokens = prompt(NUM_TOKENS, seed=4)
    with Engine(shared.target) as engine:
        stored(engine, tokens, 5 * CHUNK_TOKENS)
    with Engine(shared.target, model="another model") as engine:
        assert engine.lookup(tokens) == 0
        assert engine.retrieve(tokens)[0] == 0


def test_a_dead_daemon_is_a_miss_and_comes_back(tmp_path: Path) -> None:
    nvme = ("tiers.nvme.capacity=64MiB", "tiers.nvme.segment=16MiB", f"tiers.nvme.path={tmp_path}/nvme")
    daemon = Daemon(tmp_path, settings=("tiers.dram.capacity=32MiB", "tiers.dram.extent=8MiB", *nvme))
    tokens, other = prompt(NUM_TOKENS, seed=5), prompt(NUM_TOKENS, seed=6)
    with Engine(daemon.target) as engine:  # nobody listens yet
        assert engine.lookup(tokens) == 0
        engine.store(tokens)
        assert engine.retrieve(tokens)[0] == 0
        daemon.start()
        try:
            until(lambda: engine.remote.guard.ask("probe", lambda: True) is True)  # the breaker's pause
            stored(engine, tokens, 5 * CHUNK_TOKENS)
            daemon.stop(signal.SIGKILL)
            for _ in range(3):
                engine.store(other)
                assert engine.lookup(other) == 0
                assert engine.retrieve(tokens)[0] == 0
            daemon.start()
            until(lambda: engine.remote.guard.ask("probe", lambda: True) is True)
            stored(engine, other, 5 * CHUNK_TOKENS)
            assert engine.retrieve(other) == (5 * CHUNK_TOKENS, True)
        finally:
            daemon.close()


def test_a_full_daemon_serves_what_it_has(tmp_path: Path) -> None:
    """Four mebibytes of room, six written: what comes back is right."""
    num_chunks = 40
    num_tokens = num_chunks * CHUNK_TOKENS
    seeds = range(10, 20)
    assert len(seeds) * num_chunks * CHUNK_BYTES > 6 << 20
    small = ("tiers.dram.capacity=4MiB", "tiers.dram.extent=2MiB")
    with Daemon(tmp_path, settings=small) as daemon, Engine(daemon.target) as engine:
        for seed in seeds:
            stored(engine, prompt(num_tokens, seed), num_tokens)
        answers = [engine.retrieve(prompt(num_tokens, seed)) for seed in seeds]
        assert all(is_right for _, is_right in answers)
        assert min(answers)[0] < num_tokens
        assert answers[-1] == (num_tokens, True)


@pytest.mark.parametrize(
    "wrong",
    [
        {"remote_serde": "cachegen"},
        {"extra": {"remote_storage_plugin.kvtier.tarjet": "x"}},
        {"extra": {"remote_storage_plugin.kvtier.weights": "nobody/knows"}},
    ],
)
def test_what_cannot_work_is_refused_and_lmcache_goes_on(wrong: dict[str, Any], shared: Daemon) -> None:
    with Engine(shared.target, **wrong) as engine:
        assert engine.remote is None
        tokens = prompt(NUM_TOKENS, seed=7)
        engine.store(tokens)
        assert engine.lookup(tokens) == 0


def test_a_cancelled_put_holds_its_chunks_until_they_are_read(
    shared: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LMCache gives memory back, and to others, when its coroutine has ended; a thread may still read it."""
    is_read, references = threading.Event(), []

    class Chunk:
        def ref_count_up(self) -> None:
            references.append(1)

        def ref_count_down(self) -> None:
            references.append(-1)

    async def cancelled(connector: KvtierConnector) -> None:
        putting = asyncio.create_task(connector.batched_put(["key"], [Chunk()]))
        await asyncio.sleep(0)
        putting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await putting
        assert sum(references) == 1
        is_read.set()
        await asyncio.get_running_loop().run_in_executor(connector._write_thread, lambda: None)
        await asyncio.sleep(0)
        assert sum(references) == 0

    with Engine(shared.target) as engine:
        connector = engine.remote
        monkeypatch.setattr(connector, "_write", lambda keys, objects: is_read.wait(WAIT_S))
        asyncio.run(cancelled(connector))


def test_an_unknown_lmcache_is_refused(shared: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lmcache, "__version__", "0.7.0")
    with Engine(shared.target) as engine:
        assert engine.remote is None
