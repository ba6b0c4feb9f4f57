"""The status with which a start ends that inherited memory: it says whether giving that up may help."""

import asyncio
import errno
import io
import mmap
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.appliance.host import assembly
from kvtier.appliance.host.process import EXIT_CANNOT_START, EXIT_REFUSED, serve
from kvtier.appliance.preflight import probes
from kvtier.tiers.memory.keeper import Keeper

from ..conftest import small_settings

MIB = 1 << 20
MAP_NORESERVE = 0x4000  # a mapping that is never touched needs no huge page


@pytest.fixture
def keeper(request: pytest.FixtureRequest) -> Iterator[Keeper]:
    """What a process inherits: 64 MiB of dram, in memory made with the flags of the test."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    descriptor = os.memfd_create("kept", getattr(request, "param", 0))
    os.ftruncate(descriptor, 64 * MIB)
    memory = mmap.mmap(descriptor, 64 * MIB, mmap.MAP_SHARED | MAP_NORESERVE)
    ours.close()  # nothing answers: what is given back is the process's own
    with theirs:
        yield Keeper(theirs, {"dram-0": (descriptor, memory)})


def start(keeper: Keeper, folder: Path, *, nvme: bool = False, **dram: str) -> int:
    """Return the status of a start that fails."""
    tiers = {"dram": {"capacity": "64MiB", "extent": "2MiB", **dram}}
    sections = {"tiers": tiers, "observe": {"http": "off"}} if dram else {"observe": {"http": "off"}}
    starting = serve(small_settings(folder, nvme=nvme, **sections), keeper)
    return asyncio.run(asyncio.wait_for(starting, 60))


def test_a_capacity_that_does_not_fit_costs_no_memory(
    keeper: Keeper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It cost all of it, and did not fit after that either: what is kept is counted in."""
    monkeypatch.setattr(probes, "available_bytes", lambda: 64 * MIB)
    assert start(keeper, tmp_path, capacity="256MiB", hugepages="off") == EXIT_REFUSED
    assert "tiers.dram.capacity: the memory tiers take" in capsys.readouterr().err


class BrokenPipe(io.StringIO):
    """A stream without a reader."""

    def write(self, _: str) -> int:
        raise BrokenPipeError


def test_a_refusal_that_has_no_reader_costs_no_memory(
    keeper: Keeper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before: the status was 1, of which the third in a row ends the supervisor."""
    monkeypatch.setattr(probes, "available_bytes", lambda: 64 * MIB)
    monkeypatch.setattr(sys, "stderr", BrokenPipe())
    assert start(keeper, tmp_path, capacity="256MiB", hugepages="off") == EXIT_REFUSED


@pytest.mark.parametrize("keeper", [os.MFD_HUGETLB | os.MFD_HUGE_2MB], indirect=True)
def test_small_pages_cannot_be_had_of_huge_ones_that_are_kept(
    keeper: Keeper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(probes, "available_bytes", lambda: 16 * MIB)
    assert start(keeper, tmp_path, hugepages="off") == EXIT_REFUSED
    assert "tiers.dram.capacity: the memory tiers take" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("number", "status"), [(errno.ENOMEM, EXIT_CANNOT_START), (errno.EACCES, EXIT_REFUSED)]
)
def test_memory_that_the_kernel_refuses_is_what_is_missing(
    number: int, status: int, keeper: Keeper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(assembly, "_open_store", refuse)
    assert start(keeper, tmp_path, nvme=True) == status
