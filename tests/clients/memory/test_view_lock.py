"""Locks that tell the next daemon what is viewed."""

import fcntl
import os
import struct
from collections.abc import Iterator

import pytest

from kvtier.clients.memory.view_lock import ViewLock
from kvtier.v1.view_locks import is_locked


@pytest.fixture
def index() -> Iterator[int]:
    descriptor = os.memfd_create("index")
    yield descriptor
    os.close(descriptor)


def test_an_extent_is_locked_until_the_last_lease_gives_it_back(index: int) -> None:
    lock = ViewLock(index)
    lock.take({1, 1 << 20})
    lock.take({1})
    assert [is_locked(index, extent) for extent in (0, 1, 2, 1 << 20)] == [False, True, False, True]
    lock.give_back({1, 1 << 20})
    assert [is_locked(index, extent) for extent in (1, 1 << 20)] == [True, False]
    lock.give_back({1})
    assert not is_locked(index, 0, 0)


def test_locks_go_with_their_process_not_with_another_descriptor(index: int) -> None:
    lock = ViewLock(index)
    lock.take({5})
    os.close(os.open(f"/proc/self/fd/{index}", os.O_RDONLY))
    assert is_locked(index, 5)
    del lock
    assert not is_locked(index, 5)


def test_a_forked_child_leaves_the_locks_to_its_parent(index: int) -> None:
    """Both have the same open file, so either could drop the lock that says that the parent reads there."""
    lock = ViewLock(index)
    lock.take({5})
    child = os.fork()
    if not child:
        lock.give_back({5})
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert is_locked(index, 5)
    lock.give_back({5})
    assert not is_locked(index, 5)


def test_an_exclusive_lock_of_another_client_is_as_good(index: int) -> None:
    """A member of the same isolation domain may take one; that is no error of anybody else's lease."""
    rival = os.open(f"/proc/self/fd/{index}", os.O_RDWR)
    everything = struct.pack("@hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    fcntl.fcntl(rival, fcntl.F_OFD_SETLK, everything)
    lock = ViewLock(index)
    lock.take({3})
    assert is_locked(index, 3)
    lock.give_back({3})
    os.close(rival)
    assert not is_locked(index, 3)
