"""The audit of the cold store beside workers that begin and end segments: it judges no life in the middle."""

import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import pytest

from kvtier.tiers.base import Cause, CopyError
from kvtier.tiers.cold.engine import ColdStore
from kvtier.tiers.cold.manifest import Kind

from .store import cold


class AskedLock:
    """A lock that tells when somebody asks for it."""

    def __init__(self, lock: threading.Lock, asked: threading.Event) -> None:
        self._lock, self._asked = lock, asked

    def __enter__(self) -> bool:
        self._asked.set()
        return self._lock.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.__exit__(kind, value, trace)


def after_the_manifest(
    store: ColdStore, kind: Kind, then: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Call `then` when the manifest was told of `kind`, and the engine has not gone on yet."""
    append = store._manifest.append

    def told(event: bytes, *, durable: bool = False) -> None:
        append(event, durable=durable)
        if event[0] == kind:
            then()

    monkeypatch.setattr(store._manifest, "append", told)


def test_a_life_that_ends_is_not_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with cold(tmp_path) as opened:
        opened.put([1])
        seen: list[list[str]] = []
        store = opened.store
        after_the_manifest(store, Kind.FREED, lambda: seen.append(store.check_integrity()), monkeypatch)
        store.free(0)
        assert seen == [[]]
        assert store.check_integrity() == []


def test_a_life_that_could_not_end_is_judged_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with cold(tmp_path) as opened:
        opened.put([1])

        def full(event: bytes, *, durable: bool = False) -> None:
            raise CopyError(Cause.NO_SPACE, "the disk is full")

        monkeypatch.setattr(opened.store._manifest, "append", full)
        with pytest.raises(CopyError):
            opened.store.free(0)
        monkeypatch.undo()
        assert opened.store.check_integrity() == []
        opened.store._segments[0].epoch += 1
        assert "its epoch" in opened.store.check_integrity()[0]
        opened.store._segments[0].epoch -= 1


def test_a_life_that_begins_is_judged_when_it_has_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with cold(tmp_path) as opened:
        store, asked, seen = opened.store, threading.Event(), [["never looked"]]

        def audit() -> None:
            seen[0] = store.check_integrity()
            asked.set()

        auditor = threading.Thread(target=audit)

        def look() -> None:
            # Only the audit's lock tells; the engine's workers hold the same one plain.
            monkeypatch.setattr(store._state, "lock", AskedLock(store._state.lock, asked))
            auditor.start()
            assert asked.wait(60)
            monkeypatch.undo()

        after_the_manifest(store, Kind.OPENED, look, monkeypatch)
        opened.put([1])
        auditor.join(60)
        assert seen == [[]]
