"""A real daemon in a process of its own, real conversations, and a real browser.

Skipped without playwright and a Chromium: `apt install chromium`, or name one in KVTIER_CHROMIUM.
"""

import json
import os
import shutil
import socket
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier.tiers.ladder import STANDARD

from ..daemon import Daemon
from .chats import SETTINGS, Chats

BROWSERS = ("chromium", "chromium-headless-shell", "google-chrome")
HOSTILE = '<img src=x onerror="window.wasHarmed=1"><script>window.wasHarmed=1</script>'
NAMES = (HOSTILE, "&lt;b&gt;שלום", "a-name-that-does-not-end-" + "x" * 200)
PACE = 6.0
TIERS = ("hbm", "dram", "nvme")


def chromium() -> str | None:
    """Return the path of a browser, None when there is none."""
    return os.environ.get("KVTIER_CHROMIUM") or next(filter(None, map(shutil.which, BROWSERS)), None)


class Site:
    """A daemon of `tiers` with a page, busy with conversations."""

    def __init__(
        self,
        folder: Path,
        names: tuple[str, ...] = NAMES,
        pace: float = PACE,
        tiers: tuple[str, ...] = TIERS,
    ) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = int(probe.getsockname()[1])
        values = {
            **SETTINGS,
            "tiers.nvme.path": str(folder / "nvme"),
            "observe.names": "true",
            "observe.http": f"127.0.0.1:{self.port}",
        }
        left_out = tuple(f"tiers.{tier}." for tier in TIERS if tier not in tiers)
        values = {key: value for key, value in values.items() if not key.startswith(left_out)}
        self.daemon = Daemon(folder, settings=values)
        self.url = f"http://127.0.0.1:{self.port}/"
        self.chats = Chats(self.daemon.target, names=names, pace=pace, fastest=STANDARD.named(tiers[0]))
        self._player: threading.Thread | None = None

    def start(self) -> None:
        """Start the daemon, and conversations."""
        self.daemon.start()
        self.play()

    def play(self) -> None:
        """Start conversations."""
        self.chats.stop.clear()
        self._player = threading.Thread(target=self.chats.play)
        self._player.start()

    def hush(self) -> None:
        """End the conversations; the daemon goes on."""
        self.chats.stop.set()
        if self._player is not None:
            self._player.join()

    def snapshot(self) -> Any:
        """Return what the page is told."""
        with urllib.request.urlopen(f"{self.url}api/snapshot", timeout=60) as answer:
            return json.load(answer)

    def close(self) -> None:
        """End all of it."""
        self.hush()
        self.daemon.close()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """A site that runs."""
    one = Site(tmp_path)
    try:
        one.start()
        yield one
    finally:
        one.close()


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """A Chromium without a window."""
    api = pytest.importorskip("playwright.sync_api", reason="make test-web installs playwright")
    path = chromium()
    if path is None:
        pytest.skip("no Chromium here: apt install chromium, or set KVTIER_CHROMIUM")
    with api.sync_playwright() as playwright:
        # Chromium's sandbox wants a user who is not root
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        running = playwright.chromium.launch(executable_path=path, args=arguments)
        yield running
        running.close()
