"""Fixtures that more than one folder of tests uses."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.clients.options import DEFAULT_TIMEOUT

from .daemon import PATIENT, TWO_MEMORIES, Daemon
from .sources.objects.gateway import Gateway, gateway
from .sources.objects.gateway import why_not as no_gateway
from .sources.objects.s3_server import S3Server, s3_server

# Whether a slow daemon is a miss is asked by few tests, and they name their time limits. The others would ask
# it by chance, on a machine that stands still for a moment.
for name in ("call_s", "connect_s"):
    object.__setattr__(DEFAULT_TIMEOUT, name, getattr(PATIENT, name))

if importlib.util.find_spec("hypothesis") is not None:  # the runtimes' environments do without
    from hypothesis import settings

    # The same examples in every run: a change is judged by what it did, not by what was drawn that day.
    settings.register_profile("kvtier", derandomize=True, deadline=None)
    settings.load_profile("kvtier")


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A real S3 gateway; skips, with words, where there is none."""
    if reason := no_gateway():
        pytest.skip(reason)
    with gateway(tmp_path_factory.mktemp("s3")) as running:
        yield running


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """An S3 server of the tests' own, which fails as it is told to. The environment names it."""
    with s3_server() as running:
        for name, value in running.environment().items():
            monkeypatch.setenv(name, value)
        yield running


@pytest.fixture(scope="session")
def shared_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A running daemon of 16 MiB DRAM and no NVMe that many tests share: use a namespace of your own."""
    small = ("tiers.dram.capacity=16MiB", "tiers.dram.extent=2MiB")
    with Daemon(tmp_path_factory.mktemp("daemon"), settings=small) as running:
        yield running


@pytest.fixture
def two_memories(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A running daemon of two memories, empty: a full one evicts blocks."""
    with Daemon(tmp_path_factory.mktemp("memories"), settings=TWO_MEMORIES) as running:
        yield running


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    """A running daemon with default settings, in a process of its own."""
    with Daemon(tmp_path) as running:
        yield running
