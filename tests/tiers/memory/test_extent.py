"""Extents: what the host gives, and what is said when it does not."""

import contextlib
import gc
import logging
import mmap
import os
import socket
import threading

import pytest

from kvtier.tiers.memory import memfd
from kvtier.tiers.memory.extent import SlotExtent
from kvtier.tiers.memory.keeper import Keeper
from kvtier.v1.shm import extent_file_bytes

SIZE = 4 << 20


def count_descriptors() -> int:
    """Count the memory files that this process has open, less what earlier tests left to the collector.
    Sockets of theirs close when their libraries' threads come to it."""
    gc.collect()
    links = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            links.append(os.readlink(f"/proc/self/fd/{number}"))
    return sum("memfd:" in link or "hugepage" in link for link in links)


def test_layout_and_prefault() -> None:
    extent = SlotExtent("test", SIZE)
    assert os.fstat(extent.descriptor).st_size == extent_file_bytes(SIZE)
    assert len(extent.data) == SIZE
    assert len(extent.headers.table()) == extent.num_slots == SIZE // (16 << 10)
    assert all(extent.headers.table()["generation"] % 2 == 1), "an empty slot is not readable"
    assert not extent.report().prefaulted
    extent.data[100] = 7
    extent.prefault()
    extent.prefault()
    assert extent.data[100] == 7, "prefault changes no content"
    assert extent.report().prefaulted
    assert os.fstat(extent.descriptor).st_blocks * 512 >= extent_file_bytes(SIZE)
    extent.close()
    extent.close()


def test_memory_of_a_daemon_that_was_killed_before_it_sealed_it_is_sealed() -> None:
    """A daemon hands memory to the supervisor and then seals it; clients map no memory that may shrink."""
    kept = memfd.create_mapped("test", extent_file_bytes(SIZE), "")
    with socket.socket() as unused:
        extent = SlotExtent("test", SIZE, keeper=Keeper(unused, {"test": kept}))
    with pytest.raises(PermissionError):
        os.ftruncate(extent.descriptor, SIZE)
    with pytest.raises(PermissionError):
        mmap.mmap(extent.descriptor, SIZE)  # writable
    mmap.mmap(extent.descriptor, SIZE, prot=mmap.PROT_READ).close()
    extent.close()


def test_prefault_stops_when_told() -> None:
    extent = SlotExtent("test", SIZE)
    stop = threading.Event()
    stop.set()
    extent.prefault(stop)
    assert not extent.report().prefaulted
    extent.close()


def test_huge_pages_are_used_where_the_host_has_them() -> None:
    needed = extent_file_bytes(SIZE) // (2 << 20)
    has_them = memfd.free_huge_pages() >= needed
    extent = SlotExtent("test", SIZE, huge_pages=True)
    assert extent.report().huge_pages == has_them
    extent.data[:4] = b"fine"
    extent.close()
    extent = SlotExtent("test", SIZE, huge_pages=False)
    assert not extent.report().huge_pages
    extent.close()


def test_huge_pages_that_are_taken_meanwhile_fall_back(monkeypatch: pytest.MonkeyPatch) -> None:
    # The host's answer is the only thing replaced: it says yes, and then has none.
    if memfd.free_huge_pages():
        pytest.skip("this host has huge pages")
    monkeypatch.setattr(memfd, "free_huge_pages", lambda nodes: 1000)
    num_descriptors = count_descriptors()
    extent = SlotExtent("test", SIZE)
    assert not extent.report().huge_pages
    extent.close()
    assert count_descriptors() == num_descriptors


def test_numa_nodes() -> None:
    try:
        extent = SlotExtent("test", SIZE, numa_nodes=[0])
    except memfd.SharedMemoryError as refused:
        pytest.skip(f"this host does not let us choose: {refused}")
    assert extent.report().numa_nodes == (0,)
    extent.prefault()
    with open("/proc/self/numa_maps") as maps:
        placed = [line for line in maps if "memfd:test" in line]
    assert any(" bind:0 " in line for line in placed), placed
    extent.close()


@pytest.mark.parametrize("node", [-1, 900, 5000])
def test_a_numa_node_that_is_not_there_is_refused(node: int) -> None:
    num_descriptors = count_descriptors()
    with pytest.raises(memfd.SharedMemoryError, match=r"numa_nodes|/sys/devices/system/node"):
        SlotExtent("test", SIZE, numa_nodes=[node])
    assert count_descriptors() == num_descriptors


def test_closing_under_a_view_is_said_and_harmless(caplog: pytest.LogCaptureFixture) -> None:
    extent = SlotExtent("test", SIZE)
    view = extent.data[10:20]
    with caplog.at_level(logging.WARNING):
        extent.close()
    assert "view" in caplog.text
    view[0] = 1  # still mapped: no SIGSEGV
    assert view[0] == 1
