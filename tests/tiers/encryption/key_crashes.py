"""Replacing the key file, cut short: the process ends before or after any of its system calls, or the power
goes, and with it what nobody had flushed."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtier.tiers import durable
from kvtier.tiers.encryption.keyring import FILE_NAME

#: System calls that replacing the file takes, in their order; the last two inside of the one before.
STEPS = ["open", "fsync", "rename", "sync_directory", "open", "fsync"]
#: What a loss of power takes of what was not flushed, and the steps at which it could matter, in the right
#: order of them or a wrong one.
LOSSES = {"nothing": range(len(STEPS) + 1), "content": range(1, 4), "name": range(2, 6)}


class Crash(Exception):
    """The process ends here."""


class KeyFileCrash:
    """Ends the process at one step of replacing the key file of `directory`: before call `number`, or after
    it. With a number past the last it only watches; `seen` are the calls that were made."""

    def __init__(self, directory: Path, number: int, *, is_after: bool) -> None:
        self._path = directory / FILE_NAME
        self._before = self._path.read_bytes()
        self._number = number
        self._is_after = is_after
        self.seen: list[str] = []
        self.done: list[str] = []

    @property
    def is_renamed(self) -> bool:
        """Whether the new file stands in the place of the old one."""
        return "rename" in self.done

    def arm(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Watch the system calls from now on."""
        for name, owner in (("open", os), ("fsync", os), ("sync_directory", durable)):
            monkeypatch.setattr(owner, name, self._ending(name, getattr(owner, name)))
        monkeypatch.setattr(Path, "rename", self._ending("rename", Path.rename))

    def lose(self, what: str) -> None:
        """Take from the disk what a loss of power may take, if it was not flushed."""
        if what == "content" and "fsync" not in self.done:
            written = self._path if self.is_renamed else self._path.with_name(f"{FILE_NAME}.new")
            if written.exists():
                written.write_bytes(written.read_bytes()[:40])
        if what == "name" and self.is_renamed and self.done.count("fsync") < 2:
            self._path.write_bytes(self._before)

    def _ending(self, name: str, call: Callable[..., object]) -> Callable[..., object]:
        def ending(*arguments: object, **named: object) -> object:
            self.seen.append(name)
            is_now = len(self.seen) == self._number + 1
            if is_now and not self._is_after:
                raise Crash
            result = call(*arguments, **named)
            self.done.append(name)
            if is_now:
                raise Crash
            return result

        return ending


def at_every_step(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test for every step, before it and after it, and for every loss."""
    places = [
        (number, is_after, loss)
        for loss, numbers in LOSSES.items()
        for number in numbers
        for is_after in (False, True)
        if number < len(STEPS) or not is_after
    ]
    marked: Callable[..., None] = pytest.mark.parametrize(("number", "is_after", "loss"), places)(test)
    return marked
