"""The benchmark's worker with memcpy as the store: it measures, and it notices wrong bytes."""

from pathlib import Path

import numpy as np
import pytest

from bench.peer_memcpy import Memcpy
from bench.rig import seated, stores
from bench.table import percentile
from bench.transfer import TransferRow, report, with_ratios
from bench.worker import KIB, MIB, Worker, WrongBytes

SIZE, BATCH = 64 * KIB, 4


@pytest.fixture
def worker() -> Worker:
    worker = Worker(Memcpy())
    worker.start(pool=8 * MIB)
    worker.prepare(size=SIZE, batch=BATCH, chains=5)
    return worker


def test_each_operation_is_timed_once_per_call(worker: Worker) -> None:
    assert len(worker.get(count=12)["ns"]) == 12
    assert len(worker.lookup(count=3, keys=2)["ns"]) == 3
    assert len(worker.put(count=7, form="staging")["ns"]) == 7


def test_a_changed_byte_is_noticed(worker: Worker) -> None:
    store = worker.adapter
    assert isinstance(store, Memcpy)
    store.slots[:, 100] ^= np.uint64(1)
    with pytest.raises(WrongBytes, match="not put"):
        worker.get(count=1)


def test_another_objects_bytes_are_noticed(worker: Worker) -> None:
    store = worker.adapter
    assert isinstance(store, Memcpy)
    store.slots[[0, BATCH]] = store.slots[[BATCH, 0]]
    with pytest.raises(WrongBytes, match="another object"):
        worker.get(count=1)


def test_a_store_that_forgets_is_noticed(worker: Worker) -> None:
    worker.adapter.get = lambda names: len(names) - 1  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="3 of 4"):
        worker.get(count=1)


def test_the_pipe_carries_answers_and_errors(tmp_path: Path) -> None:
    with seated(["memcpy"], tmp_path, pool=64 * MIB) as (seat,):
        seat.call("prepare", size=SIZE, batch=BATCH, chains=2)
        assert len(seat.call("get", count=3)["ns"]) == 3
        with pytest.raises(RuntimeError, match="memcpy: NotImplementedError: memcpy has no address"):
            seat.call("connect", address="nowhere")
        assert len(seat.call("get", count=1)["ns"]) == 1


def test_a_peer_that_is_not_installed_has_no_seat(tmp_path: Path) -> None:
    assert stores(tmp_path, ["memcpy", "kvtier", "mooncake", "lmcache"]) == ["memcpy", "kvtier"]


def test_ratios_compare_the_same_form() -> None:
    def row(store: str, form: str, speed: float) -> TransferRow:
        return TransferRow("put", store, form, SIZE, 1, 10, speed, speed, 1e6, 2e6)

    rows = [
        row("memcpy", "staging", 10.0),
        row("kvtier", "staging", 8.0),
        row("kvtier", "plain", 6.0),
        row("mooncake", "staging", 4.0),
        row("mooncake", "plain", 2.0),
    ]
    assert [one.kvtier_over for one in with_ratios(rows)] == [0.8, None, None, 2.0, 3.0]
    assert [one.of_memcpy for one in rows] == [None, 0.8, 0.6, 0.4, 0.2]
    assert "mooncake (plain)" in report(rows)


def test_percentiles_are_nearest_rank() -> None:
    values = list(range(1, 101))
    assert [percentile(values, share) for share in (0.0, 0.5, 0.99, 1.0)] == [1, 51, 100, 100]
