"""How much was written outlives the daemon: a restart is no new day, and a bad file costs a log line."""

import json
import logging
from pathlib import Path

import pytest

from kvtier.appliance.core.copying.write_budget import DAY_S, WriteBudget
from kvtier.appliance.persisted.writes_file import WritesFile

from ..conftest import small_settings
from ..loops import DaemonThread, run
from ..raw_client import RawClient, chain

HEADS = 4  # fragments of 16 KiB
BLOCK_BYTES = 32 << 10
DAILY = 1_000_000


class Life:
    """A budget and its file, in a life of a daemon that begins at a time of day and a time of its own."""

    def __init__(self, folder: Path, wall: float, clock: float) -> None:
        self.wall, self.clock = wall, clock
        self.budget = WriteBudget(DAILY)
        self.file = WritesFile(folder, self.budget, lambda: self.clock, lambda: self.wall)

    def sleep(self, seconds: float) -> None:
        self.wall += seconds
        self.clock += seconds

    def keep(self) -> None:
        async def main() -> None:
            await self.file.keep()

        run(main())


def test_what_was_written_counts_in_the_next_life(tmp_path: Path) -> None:
    first = Life(tmp_path, wall=1e9, clock=5000.0)
    first.budget.wrote(DAILY, first.clock)
    first.sleep(DAY_S / 4)
    first.keep()
    kept = (tmp_path / "writes.json").read_bytes()
    second = Life(tmp_path, wall=first.wall + DAY_S / 4, clock=17.0)
    second.file.restore(kept)
    assert second.budget.left_bytes(second.clock) == pytest.approx(DAILY / 2, rel=1e-3)
    assert second.budget.written(second.clock) == DAILY
    second.sleep(0.6 * DAY_S)
    assert second.budget.written(second.clock) == 0


def test_a_clock_that_was_put_back_gives_nothing(tmp_path: Path) -> None:
    first = Life(tmp_path, wall=1e9, clock=0.0)
    first.budget.wrote(DAILY, 0.0)
    first.keep()
    second = Life(tmp_path, wall=1e9 - 30 * DAY_S, clock=0.0)
    second.file.restore((tmp_path / "writes.json").read_bytes())
    assert second.budget.left_bytes(0.0) == 0


@pytest.mark.parametrize(
    "data",
    [
        b"{",
        b"[]",
        b"{}",
        b'{"at": 1, "as_of": 0, "bucket": {"a": "x"}, "hours": {}}',
        b'{"at": 1, "as_of": 1e999, "left_bytes": 1, "hours": {"0": 1e999}}',
        b"\xff" * 100,
    ],
)
def test_a_bad_file_costs_a_line_in_the_log(
    tmp_path: Path, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    life = Life(tmp_path, wall=1e9, clock=0.0)
    with caplog.at_level(logging.WARNING):
        life.file.restore(data)
    assert life.budget.left_bytes(0.0) == DAILY
    assert "writes.json is not understood" in caplog.text


def test_who_exceeds_the_budget_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    life = Life(tmp_path, wall=1e9, clock=0.0)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            life.budget.wrote(DAILY, life.clock)
            life.keep()
    assert caplog.text.count("more than tiers.nvme.daily_writes") == 1


def test_a_daemon_keeps_it(tmp_path: Path) -> None:
    settings = small_settings(tmp_path, nvme=True, write="idle")
    with DaemonThread(settings) as served:
        with RawClient(served.daemon.service.facts.local_socket_path) as client:
            client.attach()
            namespace = client.register(heads=HEADS)
            client.put(namespace, chain(8, "a"), b"\5" * (8 * BLOCK_BYTES))
        served.wait(served.daemon.appliance.settled())
        before = served.call(served.daemon.observability.view.writes)
        assert before is not None
        assert before["written_bytes"] >= 8 * BLOCK_BYTES
    assert json.loads((tmp_path / "nvme" / "writes.json").read_bytes())["hours"]
    with DaemonThread(settings) as served:
        after = served.call(served.daemon.observability.view.writes)
        assert after is not None
        assert after["written_bytes"] == before["written_bytes"]
