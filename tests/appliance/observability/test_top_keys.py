"""`kvtier top` in a terminal: how it is left, and that the terminal is as it was before."""

import contextlib
import os
import pty
import signal
import subprocess
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvtier.appliance.cli.top import keys

from .conftest import Shown, Start, use

ENTER_SCREEN, LEAVE_SCREEN, SHOW_CURSOR = b"\x1b[?1049h", b"\x1b[?1049l", b"\x1b[?25h"
PATIENCE_S = 60.0


def _take_terminal() -> None:
    """Become what ^C of this terminal goes to, and hear it: tests that run in the background ignore it."""
    os.close(os.open(os.ttyname(0), os.O_RDWR))
    signal.signal(signal.SIGINT, signal.default_int_handler)


class Terminal:
    """`kvtier top` in a pseudo-terminal of its own."""

    def __init__(self, shown: Shown, *arguments: str) -> None:
        self._ours, self.theirs = pty.openpty()
        self.before = termios.tcgetattr(self.theirs)
        command = [sys.executable, "-m", "kvtier.appliance.cli", "top", "--target", shown.target, *arguments]
        self.process = subprocess.Popen(
            command,
            stdin=self.theirs,
            stdout=self.theirs,
            stderr=self.theirs,
            start_new_session=True,
            preexec_fn=_take_terminal,
            env=dict(os.environ, TERM="xterm-256color", COLUMNS="120", LINES="40"),
        )
        self.output = bytearray()
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # how a pseudo-terminal says that it is over
            while chunk := os.read(self._ours, 65_536):
                with self._news:
                    self.output += chunk
                    self._news.notify_all()

    def see(self, words: bytes) -> None:
        """Wait until words were written."""
        with self._news:
            assert self._news.wait_for(lambda: words in self.output, PATIENCE_S), bytes(self.output)

    def grow(self, num_bytes: int) -> None:
        """Wait until more than so many bytes were written."""
        with self._news:
            assert self._news.wait_for(lambda: len(self.output) > num_bytes, PATIENCE_S)

    def press(self, keys: bytes) -> None:
        """Press keys."""
        os.write(self._ours, keys)

    def end(self) -> int:
        """Wait until the command has ended by itself, and its last words were read; return its exit code."""
        code = self.process.wait(PATIENCE_S)
        self.after = termios.tcgetattr(self.theirs)
        os.close(self.theirs)
        self._reader.join(PATIENCE_S)
        os.close(self._ours)
        return code


@pytest.fixture
def watch(start: Start) -> Iterator[Callable[..., Terminal]]:
    """Run `kvtier top` beside a daemon that has something to show."""
    shown = start()
    use(shown)
    running: list[Terminal] = []

    def make(*arguments: str) -> Terminal:
        running.append(Terminal(shown, *arguments))
        return running[-1]

    yield make
    for terminal in running:
        terminal.process.kill()
        terminal.process.wait()


def press(keys: bytes) -> Callable[[Terminal], None]:
    """Return what presses keys."""
    return lambda terminal: terminal.press(keys)


def terminate(terminal: Terminal) -> None:
    """Send SIGTERM."""
    terminal.process.send_signal(signal.SIGTERM)


@pytest.mark.parametrize(
    "leave",
    [press(b"q"), press(b"Q"), press(b"xyq"), press(b"\x03"), terminate],
    ids=["q", "Q", "after other keys", "Ctrl-C", "SIGTERM"],
)
def test_it_is_left_and_the_terminal_is_as_before(watch: Any, leave: Callable[[Terminal], None]) -> None:
    terminal = watch("--interval", "3600")  # a key counts at once, not after the interval
    terminal.see(b"hits")
    assert ENTER_SCREEN in terminal.output
    leave(terminal)
    assert terminal.end() == 0
    assert terminal.after == terminal.before
    assert terminal.output.rindex(LEAVE_SCREEN) > terminal.output.rindex(b"hits")
    assert SHOW_CURSOR in terminal.output
    assert b"Traceback" not in terminal.output


def test_it_draws_again_until_then(watch: Any) -> None:
    terminal = watch("--interval", "0.2")
    terminal.see(b"hits")
    drawn = len(terminal.output)
    terminal.press(b"x")
    terminal.grow(drawn)
    terminal.press(b"q")
    assert terminal.end() == 0


def test_a_signal_that_arrives_before_the_wait_ends_it() -> None:
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        with open(os.devnull) as nothing, keys(nothing) as wait:
            assert wait(0.0) == ""
            os.kill(os.getpid(), signal.SIGUSR1)  # handled now, and the wait begins afterwards
            assert wait(PATIENCE_S) == "q"
    finally:
        signal.signal(signal.SIGUSR1, before)
