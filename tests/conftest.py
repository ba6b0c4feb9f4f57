"""Fixtures that more than one folder of tests uses."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from .daemon import Daemon, why_not


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    """A running daemon with default settings, in a process of its own."""
    if reason := why_not():
        pytest.skip(reason)
    running = Daemon(tmp_path)
    running.start()
    try:
        yield running
    finally:
        running.close()
