"""Daemons that end, or are killed, while an object store keeps them waiting."""

import contextlib
import threading
from pathlib import Path
from signal import SIGKILL

import numpy as np
import pytest

from kvtier.clients import Client, KvtierError
from tests.sources.objects.bundles import verify_bundle
from tests.sources.objects.s3_server import S3Answer, S3Request, S3Server, late

from ..daemon import PATIENT, Daemon
from .test_shared_store import (
    CHAIN_BLOCKS,
    DEADLINE_S,
    GEOMETRY,
    IDENTITY,
    NUM_CHAINS,
    STORED_BLOCKS,
    data_of,
    expect,
    fill,
    host,
    names_of,
)

URL = "s3://bucket/fleet"


def held_up(server: S3Server, operation: str) -> threading.Event:
    """Do what is asked, and answer one kind of request never; return what is set when the first one came."""
    came = threading.Event()

    def change(request: S3Request, answer: S3Answer) -> S3Answer:
        if request.operation != operation:
            return answer
        came.set()
        return late(answer, threading.Event())

    server.change = change
    return came


def read_what_is_there(daemon: Daemon) -> int:
    """Read every chain, whatever there is of it, as it was put; return the blocks."""
    num_blocks = 0
    with Client(daemon.target, timeout=PATIENT) as client:
        namespace = client.register(IDENTITY)
        for chain in range(NUM_CHAINS):
            got = client.get(namespace, names_of(chain))
            assert got.num_blocks <= CHAIN_BLOCKS
            data = data_of(chain)[: got.num_blocks * GEOMETRY.block_bytes]
            np.testing.assert_array_equal(got.data, data)
            num_blocks += got.num_blocks
    return num_blocks


@pytest.mark.parametrize("operation", ["put", "head"])
def test_a_daemon_that_is_killed_while_it_exports(operation: str, server: S3Server, tmp_path: Path) -> None:
    with host(tmp_path / "first", URL, "eager") as first:
        came = held_up(server, operation)
        fill(first)
        assert came.wait(DEADLINE_S)
        first.stop(SIGKILL)
        server.heal()
        first.start()
        read_what_is_there(first)
        fill(first)
        expect(first, CHAIN_BLOCKS)
        assert first.stop() == 0
    assert server.objects
    for stored in server.objects.values():
        verify_bundle(memoryview(stored.data))


def test_a_daemon_that_is_killed_while_it_fetches(server: S3Server, tmp_path: Path) -> None:
    with host(tmp_path / "first", URL, "eager") as first:
        fill(first)
        assert first.stop() == 0
    assert len(server.objects) == NUM_CHAINS * STORED_BLOCKS // 4, "SIGTERM exports what is left"
    with host(tmp_path / "second", URL, "off") as second:
        came = held_up(server, "get")
        reading = threading.Thread(target=_read_and_fail, args=(second,))
        reading.start()
        assert came.wait(DEADLINE_S)
        second.stop(SIGKILL)
        reading.join()
        server.heal()
        second.start()
        second.wait_for_log(f"object store {URL}: in use")
        expect(second, STORED_BLOCKS)
        assert second.stop() == 0


def _read_and_fail(daemon: Daemon) -> None:
    with contextlib.suppress(KvtierError), Client(daemon.target, timeout=PATIENT) as client:
        client.get(client.register(IDENTITY), names_of(0))


def test_sigterm_ends_a_daemon_whose_store_does_not_answer(server: S3Server, tmp_path: Path) -> None:
    with host(tmp_path / "first", URL, "eager") as first:
        came = held_up(server, "put")
        fill(first)
        assert came.wait(DEADLINE_S)
        assert first.stop() == 0
