"""The L2 adapter of LMCache's multi-process server, made by LMCache's factory, against the real daemon."""

import json
import os
import queue
import select
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from kvtier.clients import KvtierError

from ..daemon import Daemon

WHY = "lmcache is not installed; `make test-lmcache` runs this"
pytest.importorskip("lmcache", reason=WHY)
torch = pytest.importorskip("torch", reason=WHY)

from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey  # noqa: E402
from lmcache.v1.distributed.l2_adapters import create_l2_adapter  # noqa: E402
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface  # noqa: E402
from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig  # noqa: E402
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj  # noqa: E402
from lmcache.v1.platform import consume_fd  # noqa: E402

from kvtier.clients.lmcache import KvtierL2Adapter, l2  # noqa: E402
from kvtier.clients.lmcache.chunks import ChunkStore  # noqa: E402

WAIT_MS = 20_000
NUM_ELEMENTS = 6000
SHAPE = [2, 3, 10, 100]


def spec(**parameters: str) -> dict[str, Any]:
    """What a user writes after --l2-adapter."""
    return {
        "type": "plugin",
        "module_path": "kvtier.clients.lmcache",
        "class_name": "KvtierL2Adapter",
        "adapter_params": parameters,
    }


def make(**parameters: str) -> Any:
    return create_l2_adapter(PluginL2AdapterConfig.from_dict(spec(**parameters)))


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with Daemon(tmp_path_factory.mktemp("daemon"), settings=("tiers.dram.capacity=64MiB",)) as running:
        yield running


@pytest.fixture
def adapter(daemon: Daemon) -> Iterator[Any]:
    one = make(target=daemon.target)
    yield one
    one.close()


def keys_of(number: int, prompt: str, rank: int = 0, group: int = 0, salt: str = "") -> list[Any]:
    return [ObjectKey(f"{prompt}{chunk}".encode(), "a model", rank, group, salt) for chunk in range(number)]


def objects_of(number: int, seed: int | None = None, dtype: Any = torch.float32) -> list[Any]:
    """Return memory objects: random for a seed, zero without."""
    made = []
    for chunk in range(number):
        data = torch.zeros(NUM_ELEMENTS, dtype=dtype)
        if seed is not None:
            data = torch.rand(NUM_ELEMENTS, generator=torch.Generator().manual_seed(100 * seed + chunk)).to(
                dtype
            )
        about = MemoryObjMetadata(
            shape=torch.Size(SHAPE),
            dtype=dtype,
            address=data.data_ptr(),
            phy_size=data.nbytes,
            fmt=MemoryFormat.KV_2LTD,
            ref_count=1,
        )
        made.append(TensorMemoryObj(data, about, parent_allocator=None))
    return made


def wait(descriptor: int) -> None:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    assert poll.poll(WAIT_MS), "the task never ended"
    consume_fd(descriptor)


def store(adapter: Any, keys: list[Any], objects: list[Any]) -> Any:
    task = adapter.submit_store_task(keys, objects)
    wait(adapter.get_store_event_fd())
    [(number, result)] = adapter.pop_completed_store_tasks().items()
    assert number == task
    return result


def lookup(adapter: Any, keys: list[Any], layouts: dict[int, Any] | None = None) -> list[int]:
    task = adapter.submit_lookup_and_lock_task(keys, layouts or {})
    wait(adapter.get_lookup_and_lock_event_fd())
    found = adapter.query_lookup_and_lock_result(task)
    assert adapter.query_lookup_and_lock_result(task) is None, "told once"
    return [number for number in range(len(keys)) if found.test(number)]


def load(adapter: Any, keys: list[Any], objects: list[Any]) -> list[int]:
    task = adapter.submit_load_task(keys, objects)
    wait(adapter.get_load_event_fd())
    found = adapter.query_load_result(task)
    return [number for number in range(len(keys)) if found.test(number)]


def equal(left: list[Any], right: list[Any]) -> list[bool]:
    return [bytes(one.byte_array) == bytes(other.byte_array) for one, other in zip(left, right, strict=True)]


def test_it_is_lmcaches_adapter(adapter: Any) -> None:
    assert isinstance(adapter, KvtierL2Adapter)
    assert isinstance(adapter, L2AdapterInterface)
    descriptors = {
        adapter.get_store_event_fd(),
        adapter.get_lookup_and_lock_event_fd(),
        adapter.get_load_event_fd(),
    }
    assert len(descriptors) == 3
    assert adapter.report_status()["is_healthy"]
    assert not adapter.supports_global_eviction
    assert adapter.get_usage().usage_fraction == -1.0


def test_what_was_stored_is_loaded(adapter: Any) -> None:
    keys, objects, back = keys_of(6, "plain"), objects_of(6, seed=1), objects_of(6)
    assert lookup(adapter, keys) == []
    result = store(adapter, keys[:4], objects[:4])
    assert result.is_successful()
    assert result.bytes_transferred() == 4 * NUM_ELEMENTS * 4
    assert lookup(adapter, keys) == [0, 1, 2, 3]
    assert load(adapter, keys, back) == [0, 1, 2, 3]
    assert equal(back, objects) == [True] * 4 + [False] * 2
    adapter.submit_unlock(keys)
    adapter.delete(keys)


def test_an_empty_layout_is_no_layout(adapter: Any) -> None:
    """LMCache's own `bench l2` looks up with one."""
    keys = keys_of(3, "empty")
    layouts = {0: MemoryLayoutDesc([], [])}
    assert lookup(adapter, keys_of(1, "never", rank=5), layouts) == []
    store(adapter, keys, objects_of(3, seed=9))
    assert lookup(adapter, keys, layouts) == [0, 1, 2]
    assert adapter.report_status()["is_healthy"]


def test_gaps(adapter: Any) -> None:
    keys, objects, back = keys_of(5, "gaps"), objects_of(5, seed=2), objects_of(5)
    for number in (0, 2, 3):
        store(adapter, [keys[number]], [objects[number]])
    assert lookup(adapter, keys) == [0, 2, 3]
    assert load(adapter, keys, back) == [0, 2, 3]
    assert [one for one, is_same in enumerate(equal(back, objects)) if is_same] == [0, 2, 3]


def test_ranks_groups_salts_and_dtypes_never_meet(adapter: Any) -> None:
    keys = keys_of(2, "apart")
    store(adapter, keys, objects_of(2, seed=3))
    for other in (
        keys_of(2, "apart", rank=1),
        keys_of(2, "apart", group=1),
        keys_of(2, "apart", salt="somebody"),
    ):
        assert load(adapter, other, objects_of(2)) == []
    assert load(adapter, keys, objects_of(2, dtype=torch.int32)) == []
    mixed = [keys_of(2, "mixed", rank=rank)[chunk] for chunk in range(2) for rank in range(2)]
    objects, back = objects_of(4, seed=4), objects_of(4)
    store(adapter, mixed, objects)
    assert load(adapter, mixed, back) == [0, 1, 2, 3]
    assert all(equal(back, objects))


def test_ranks_and_groups_take_no_namespaces(adapter: Any) -> None:
    """LMCache's own `bench l2` gives each key a rank of its own; a daemon has 1,024 namespaces."""
    keys = [keys_of(1, "rank", rank=rank, group=rank % 3)[0] for rank in range(1100)]
    objects, back = objects_of(1100, seed=11), objects_of(1100)
    assert store(adapter, keys, objects).is_successful()
    assert lookup(adapter, keys) == list(range(1100))
    assert load(adapter, keys, back) == list(range(1100))
    assert all(equal(back, objects))


@pytest.mark.parametrize("told", ["by group", "one for all"])
def test_another_server_finds_them_by_the_layout_it_is_told(told: str, adapter: Any, daemon: Daemon) -> None:
    """Before 0.5.3, LMCache tells one layout."""
    keys, objects, back = keys_of(3, f"restart {told}"), objects_of(3, seed=5), objects_of(3)
    store(adapter, keys, objects)
    other = make(target=daemon.target)
    try:
        assert lookup(other, keys) == [], "nobody told how large they are"
        assert other.report_status()["misses"] == {l2.UNKNOWN_FORM: 3}
        layout: Any = MemoryLayoutDesc([torch.Size(SHAPE)], [torch.float32])
        assert lookup(other, keys, {0: layout} if told == "by group" else layout) == [0, 1, 2]
        assert load(other, keys, back) == [0, 1, 2]
        assert all(equal(back, objects))
    finally:
        other.close()


def test_nobody_listens(tmp_path: Any) -> None:
    away = make(target=f"unix://{tmp_path}/nobody.sock")
    keys, back = keys_of(2, "away"), objects_of(2)
    assert not store(away, keys, objects_of(2, seed=6)).is_successful()
    assert lookup(away, keys) == []
    assert load(away, keys, back) == []
    assert not away.report_status()["is_healthy"]
    away.close()


def test_a_full_queue_is_a_miss_at_once(adapter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    original = ChunkStore.which

    def slow(*arguments: Any) -> Any:
        assert go_on.wait(WAIT_MS / 1000)
        return original(*arguments)

    monkeypatch.setattr(ChunkStore, "which", slow)
    keys = keys_of(1, "queue")
    store(adapter, keys, objects_of(1, seed=7))
    tasks = [adapter.submit_lookup_and_lock_task(keys, {}) for _ in range(l2.MAX_QUEUED_TASKS + 8)]
    answers = [adapter.query_lookup_and_lock_result(task) for task in tasks]
    refused = [answer for answer in answers if answer is not None]
    assert len(refused) >= 7  # the thread holds one or none of them
    assert not any(answer.test(0) for answer in refused)
    assert adapter.guard.causes[l2.QUEUE_FULL] == len(refused)
    go_on.set()


def test_what_a_load_behind_others_reads_is_promoted(adapter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, promoted = threading.Event(), queue.SimpleQueue[tuple[int, int]]()
    original = ChunkStore.read

    def slow(*arguments: Any) -> Any:
        assert go_on.wait(WAIT_MS / 1000)
        return original(*arguments)

    def promote(store: ChunkStore, kind: Any, names: Any) -> None:
        promoted.put((kind.chunk_bytes, len(names)))

    monkeypatch.setattr(ChunkStore, "read", slow)
    monkeypatch.setattr(ChunkStore, "promote", promote)
    keys, back = keys_of(3, "behind"), objects_of(3)
    store(adapter, keys, objects_of(3, seed=12))
    parts = slice(0, 1), slice(1, 3)
    pending = {adapter.submit_load_task(keys[part], back[part]) for part in parts}
    assert promoted.get(timeout=WAIT_MS / 1000) == (NUM_ELEMENTS * 4, 2)
    go_on.set()
    while pending:
        wait(adapter.get_load_event_fd())
        pending = {task for task in pending if adapter.query_load_result(task) is None}
    assert promoted.empty(), "nothing was before the first"
    assert all(equal(back, objects_of(3, seed=12)))


def test_the_daemon_dies_between_lookup_and_load(tmp_path: Any) -> None:
    own = Daemon(tmp_path, settings=("tiers.dram.capacity=64MiB",))
    with own, closing(make(target=own.target)) as adapter:
        keys = keys_of(3, "dies")
        store(adapter, keys, objects_of(3, seed=8))
        assert lookup(adapter, keys) == [0, 1, 2]
        own.stop()
        assert load(adapter, keys, objects_of(3)) == []
        assert not store(adapter, keys, objects_of(3, seed=8)).is_successful()


@pytest.mark.parametrize(
    ("parameters", "message"),
    [({"tarjet": "x"}, "unknown setting 'tarjet'"), ({"weights": "nobody/knows"}, "neither a local path")],
)
def test_what_cannot_work_is_refused(parameters: dict[str, str], message: str, daemon: Daemon) -> None:
    def use() -> None:
        adapter = make(target=daemon.target, **parameters)
        adapter.close()

    with pytest.raises(KvtierError, match=message):
        use()


def test_lmcaches_own_check_passes(daemon: Daemon) -> None:
    """`basic_check --mode test_l2_adapter`, as its users run it."""
    command = [sys.executable, "-m", "lmcache.v1.basic_check", "--mode", "test_l2_adapter", "--num-keys", "4"]
    command += ["--l2-adapter", json.dumps(spec(target=daemon.target))]
    quiet = {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_LOG_LEVEL": "ERROR", "PYTHONHASHSEED": "0"}
    done = subprocess.run(
        command, env={**os.environ, **quiet}, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert "FAIL" not in done.stdout.upper()
    assert "4/4" in done.stdout or "success" in done.stdout.lower(), done.stdout
