"""Where streamed puts are gathered, on kernels of every kind."""

import errno
import mmap

import pytest

from kvtier.appliance.server.streams import PutBuffers


def test_a_kernel_without_huge_pages_takes_streamed_puts(monkeypatch: pytest.MonkeyPatch) -> None:
    class Plain(mmap.mmap):
        def madvise(self, *_: object) -> None:
            raise OSError(errno.EINVAL, "no such advice here")

    monkeypatch.setattr(mmap, "mmap", Plain)
    buffers = PutBuffers(1 << 20)
    first = buffers.take(5000)
    assert buffers.take(5000) != first
