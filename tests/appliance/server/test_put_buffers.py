"""Where streamed puts are gathered, on kernels of every kind."""

import errno
import mmap

import pytest

from kvtier.appliance.errors import BusyError, CallerError
from kvtier.appliance.server.streams import PutBuffers
from kvtier.v1.shm import PAGE_BYTES


def test_a_kernel_without_huge_pages_takes_streamed_puts(monkeypatch: pytest.MonkeyPatch) -> None:
    class Plain(mmap.mmap):
        def madvise(self, *_: object) -> None:
            raise OSError(errno.EINVAL, "no such advice here")

    monkeypatch.setattr(mmap, "mmap", Plain)
    buffers = PutBuffers(1 << 20)
    first = buffers.open("", 5000)
    assert buffers.open("", 5000) != first


def fill_pages(buffers: PutBuffers, tenant: str) -> None:
    """Fill buffers of a page until one is refused."""
    while True:
        buffers.fill(buffers.open(tenant, PAGE_BYTES), PAGE_BYTES)


def test_no_tenant_takes_what_the_next_one_needs() -> None:
    """One after another takes all that it gets, a page at a time; there is something for each."""
    buffers = PutBuffers(12 * PAGE_BYTES)
    taken: dict[str, int] = {}
    for tenant in ("acme", "bolt", "coil"):
        before = buffers.taken_bytes
        with pytest.raises(BusyError) as refused:
            fill_pages(buffers, tenant)
        assert refused.value.retry_after_s > 0
        taken[tenant] = (buffers.taken_bytes - before) // PAGE_BYTES
    assert taken == {"acme": 6, "bolt": 3, "coil": 1}


def test_a_buffer_takes_space_as_it_is_filled() -> None:
    capacity_bytes = 8 << 20
    buffers = PutBuffers(capacity_bytes)
    announced = [buffers.open("", capacity_bytes) for _ in range(3)]
    assert buffers.taken_bytes == 0
    buffers.fill(announced[0], 1)
    assert 0 < buffers.taken_bytes <= 2 << 20
    buffers.fill(announced[1], 6 << 20)
    with pytest.raises(BusyError):
        buffers.fill(announced[2], 1)
    buffers.give(announced[1])
    buffers.fill(announced[2], 1)
    for offset in (announced[0], announced[2]):
        buffers.give(offset)
    assert buffers.taken_bytes == 0


def test_the_largest_put_is_all_or_half_of_it_where_there_are_tenants() -> None:
    buffers = PutBuffers(1 << 20)
    buffers.open("", 1 << 20)
    buffers.open("acme", 1 << 19)
    with pytest.raises(CallerError, match="split it"):
        buffers.open("acme", (1 << 19) + 1)
