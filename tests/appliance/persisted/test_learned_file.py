"""What the policies learned outlives the daemon: real restarts, files that are none, other versions."""

import asyncio
import json
import logging
import math
import os
from pathlib import Path

import pytest

from kvtier.appliance.config import Settings
from kvtier.appliance.host.daemon import Daemon
from kvtier.appliance.persisted.learned_file import (
    MAX_BYTES,
    NAME,
    NEW_NAME,
    LearnedFile,
    read_learned,
)
from kvtier.tiers.durable import write_whole

from ..conftest import small_settings
from ..loops import DaemonThread, run
from ..raw_client import RawClient, chain

HEADS = 4  # fragments of 16 KiB
BLOCK_BYTES = 32 << 10


def settings_of(
    folder: Path, policy: str = "urgency", *, prefetch: str = "announced", nvme: bool = True
) -> Settings:
    policies = {"eviction": policy, "admission": "all", "prefetch": prefetch}
    return small_settings(folder, nvme=nvme, policy=policies)


def converse(served: DaemonThread) -> bytes:
    """Put and take 150 times, more than a batch of observations; return what was learned of it."""
    with RawClient(served.daemon.service.facts.local_socket_path) as client:
        client.attach()
        namespace = client.register(heads=HEADS)
        for number in range(150):
            client.put(namespace, chain(2, f"c{number}"), os.urandom(2 * BLOCK_BYTES))
            client.acquire(namespace, chain(2, f"c{number}"))
    served.wait(served.daemon.appliance.settled())  # the store is audited, and has to stand still for it
    return served.call(served.daemon.planner.learned)


def test_what_was_learned_survives_a_restart(tmp_path: Path) -> None:
    settings = settings_of(tmp_path)
    with DaemonThread(settings) as served:
        fresh = served.call(served.daemon.planner.learned)
        learned = converse(served)
        assert learned != fresh
    kept = (tmp_path / "nvme" / NAME).read_bytes()
    assert not (tmp_path / "nvme" / NEW_NAME).exists()
    with DaemonThread(settings) as served:
        assert served.call(served.daemon.planner.learned) == kept
        assert kept != fresh
        assert "learned_ignored" not in served.call(served.daemon.planner.statistics)["counters"]


def test_a_drain_keeps_it_at_once(tmp_path: Path) -> None:
    with DaemonThread(settings_of(tmp_path)) as served:
        converse(served)
        served.wait(served.daemon.drain(60.0))
        assert (tmp_path / "nvme" / NAME).read_bytes() == served.call(served.daemon.planner.learned)
        assert served.call(served.daemon.counters)["learned_kept"] == 1
        served.wait(served.daemon.drain(60.0))
        assert served.call(served.daemon.counters)["learned_kept"] == 1, "nothing is new"


def test_without_a_cold_store_or_a_learner_nothing_is_kept(tmp_path: Path) -> None:
    with DaemonThread(settings_of(tmp_path, nvme=False)) as served:
        converse(served)
    assert not list(tmp_path.rglob("learned*"))
    with DaemonThread(settings_of(tmp_path)) as served:
        converse(served)
    kept = (tmp_path / "nvme" / NAME).read_bytes()
    with DaemonThread(settings_of(tmp_path, "lru", prefetch="")) as served:
        assert served.call(served.daemon.planner.learned) == b""
    assert (tmp_path / "nvme" / NAME).read_bytes() == kept, "whoever goes back to urgency finds it"


def test_who_learns_meanwhile_does_not_write_over_what_others_knew(tmp_path: Path) -> None:
    with DaemonThread(settings_of(tmp_path)) as served:
        converse(served)
    before = json.loads((tmp_path / "nvme" / NAME).read_bytes())["learners"]
    with DaemonThread(settings_of(tmp_path, "lru", prefetch="announced")) as served:
        served.daemon.planner.core.policies.shared["promises"].kept(30.0, 90.0)
    now = json.loads((tmp_path / "nvme" / NAME).read_bytes())["learners"]
    assert now["promises"] != before["promises"], "it was written anew"
    assert now["forecast"] == before["forecast"]


def place(path: Path, kind: str) -> None:
    """Put something that is not what a daemon wrote where it looks."""
    if kind == "folder":
        path.mkdir()
        (path / "full").touch()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "link":
        (path.parent / "elsewhere").write_bytes(b"{}")
        path.symlink_to(path.parent / "elsewhere")
    elif kind == "large":
        with path.open("wb") as file:
            file.truncate(MAX_BYTES + 1)
    else:
        path.write_bytes({"empty": b"", "binary": os.urandom(4096), "other": b'{"format": 99}'}[kind])


@pytest.mark.parametrize("kind", ["binary", "other", "empty", "large", "folder", "pipe", "link"])
def test_a_bad_file_never_fails_a_start(tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "nvme").mkdir()
    path = tmp_path / "nvme" / NAME
    place(path, kind)
    with caplog.at_level(logging.WARNING), DaemonThread(settings_of(tmp_path)) as served:
        fresh = served.call(served.daemon.planner.learned)
        counters = served.call(served.daemon.planner.statistics)["counters"]
        assert counters.get("learned_ignored", 0) == (1 if kind in ("binary", "other") else 0)
        converse(served)
        served.wait(served.daemon.drain(60.0))
        shell = served.call(served.daemon.counters)
        assert shell["learned_not_kept"] == (1 if kind == "folder" else 0)
    if kind != "empty":
        assert any("learn" in record.getMessage() for record in caplog.records), "said in the log"
    if kind == "folder":
        assert path.is_dir(), "what cannot be replaced stays"
        return
    assert not path.is_symlink()
    assert json.loads(path.read_bytes()) != json.loads(fresh)


def test_what_nobody_knows_who_runs_now_is_kept_and_what_is_no_number_ignored(tmp_path: Path) -> None:
    (tmp_path / "nvme").mkdir()
    learners = {"somebody": {"knows": [1, 2]}, "nobody": {"knows": math.nan}}
    (tmp_path / "nvme" / NAME).write_text(json.dumps({"format": 1, "learners": learners}))
    with DaemonThread(settings_of(tmp_path)) as served:
        assert served.call(served.daemon.planner.statistics)["counters"]["learned_ignored"] == 1
        converse(served)
    kept = json.loads((tmp_path / "nvme" / NAME).read_bytes())["learners"]
    assert kept["somebody"] == {"knows": [1, 2]}
    assert kept.keys() == {"somebody", "forecast", "promises"}


def test_it_is_kept_again_and_again_and_a_failure_is_not_the_last_word(tmp_path: Path) -> None:
    (tmp_path / NAME).mkdir()
    (tmp_path / NAME / "full").touch()
    asked: list[bytes] = []

    async def main() -> LearnedFile:
        enough = asyncio.Event()

        def learned() -> bytes:
            if len(asked) == 2:  # twice it could not be written
                (tmp_path / NAME / "full").unlink()
                (tmp_path / NAME).rmdir()
            if len(asked) == 5:
                enough.set()
            asked.append(b"%d" % len(asked))
            return asked[-1]

        file = LearnedFile(tmp_path, learned, interval_s=0.0)
        file.begin()
        await asyncio.wait_for(enough.wait(), 20.0)
        await file.close()
        await file.close()
        return file

    counters = run(main()).counters
    assert counters["learned_not_kept"] == 2
    assert counters["learned_kept"] == len(asked) - 2
    assert read_learned(tmp_path) == asked[-1], "the last state"


def test_a_policy_that_cannot_say_what_it_learned_fails_nobody(tmp_path: Path) -> None:
    def learned() -> bytes:
        raise ZeroDivisionError

    async def main() -> LearnedFile:
        file = LearnedFile(tmp_path, learned)
        await file.keep()
        return file

    assert run(main()).counters == {"learned_not_kept": 1}
    assert not list(tmp_path.iterdir())


def test_a_write_that_dies_leaves_the_last_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_whole(tmp_path / NAME, b"first")

    def dies(fd: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", dies)
        with pytest.raises(OSError, match="No space"):
            write_whole(tmp_path / NAME, b"second")
    assert read_learned(tmp_path) == b"first"
    write_whole(tmp_path / NAME, b"third")
    assert read_learned(tmp_path) == b"third"


def test_a_planner_that_failed_leaves_what_was_kept(tmp_path: Path) -> None:
    async def main() -> None:
        daemon = await Daemon.start(settings_of(tmp_path))
        await daemon.learned.keep()
        daemon.appliance.failed.set_exception(RuntimeError("on purpose"))
        assert daemon._what_was_learned() == b""
        daemon.appliance.failed.exception()
        await daemon.stop()

    run(main())
    assert read_learned(tmp_path / "nvme")
