"""A client's staging extent. What a hostile client may do with it is in test_attacks.py."""

import mmap
import os
from pathlib import Path

import pytest

from kvtier.tiers.base import Cause, CopyError
from kvtier.tiers.memory.staging import StagingExtent

SIZE = 64 << 10


def test_what_the_client_writes_is_seen_here_read_only() -> None:
    staging = StagingExtent(SIZE)
    staging.prefault()()
    with mmap.mmap(os.dup(staging.descriptor), SIZE) as client:
        client[100:105] = b"bytes"
    view = staging.view(100, 5)
    assert bytes(view) == b"bytes"
    assert view.readonly
    staging.close()


def test_the_size_is_no_multiple_of_a_page_of_64_kib(monkeypatch: pytest.MonkeyPatch) -> None:
    """As kernels of aarch64 have them; clients ask for multiples of 4 KiB."""
    monkeypatch.setattr(mmap, "PAGESIZE", 64 << 10)
    staging = StagingExtent(SIZE + 4096)
    assert bytes(staging.view(SIZE, 4096)) == bytes(4096)
    staging.close()


@pytest.mark.parametrize(
    ("offset", "length"), [(-1, 10), (0, 0), (0, -5), (0, SIZE + 1), (SIZE, 1), (SIZE - 9, 10), (1 << 70, 1)]
)
def test_a_span_outside_is_refused(offset: int, length: int) -> None:
    staging = StagingExtent(SIZE)
    with pytest.raises(CopyError, match="staging_bytes"):
        staging.view(offset, length)
    staging.close()


def test_after_close_the_source_is_gone_but_a_copy_in_flight_may_end() -> None:
    staging = StagingExtent(SIZE)
    view = staging.view(0, SIZE)
    staging.close()
    staging.close()
    with pytest.raises(CopyError) as caught:
        staging.view(0, 1)
    assert caught.value.cause is Cause.SOURCE_GONE
    assert bytes(view) == bytes(SIZE)


def test_pages_are_allocated_in_no_other_file_after_the_client_is_gone(tmp_path: Path) -> None:
    extent = StagingExtent(1 << 20)
    number, allocate = extent.descriptor, extent.prefault()
    with (tmp_path / "other").open("wb") as other:
        extent.close()
        os.dup2(other.fileno(), number)
        allocate()
        os.close(number)
    assert (tmp_path / "other").stat().st_size == 0
