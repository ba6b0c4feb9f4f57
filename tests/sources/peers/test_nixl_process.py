"""NIXL's process where it cannot be started; with the library: tests/nixl."""

import asyncio
import gc
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvtier.sources.peers.connection import ConnectionLost
from kvtier.sources.peers.nixl_process import NixlProcess


def test_a_process_that_cannot_be_started_leaves_no_memory_behind(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It is tried again every minute, for as long as the daemon lives."""
    monkeypatch.setattr(sys, "executable", str(tmp_path / "missing"))

    async def start_in_vain() -> int:
        with ThreadPoolExecutor(1) as copiers:
            process = NixlProcess(copiers)
            with pytest.raises(ConnectionLost, match="does not start"):
                await process.start()
            await process.close()
            await process.close()
        gc.collect()  # mappings keep descriptors of their own
        return len(os.listdir("/proc/self/fd"))

    async def twice() -> tuple[int, int]:
        return await start_in_vain(), await start_in_vain()

    first, second = asyncio.run(twice())
    assert first == second
