"""Speeds of codecs that a daemon finds when it starts again, and what it makes of files it did not write."""

import asyncio
import contextlib
import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import pytest

from kvtier.appliance.appliance import Appliance
from kvtier.appliance.compression import codec_choice as codec_selection
from kvtier.appliance.compression.codec_choice import CANDIDATES, CodecChoice, CodecSelection
from kvtier.appliance.config import CompressionSettings
from kvtier.appliance.core.events import CompressionChosen
from kvtier.appliance.persisted.codec_speeds import NAME, SpeedFile
from kvtier.tiers.codecs.records import RecordCodecs
from tests.appliance.loops import run, turns

SPEEDS = {("bfloat16", "exponents"): 8e9, ("bfloat16", "planes"): 4e9, ("float16", "exponents"): 0.0}


class Choices:
    """What a planner is told."""

    def __init__(self) -> None:
        self.made: list[CodecChoice] = []

    def step(self, event: CompressionChosen) -> None:
        assert isinstance(event.compression, CodecChoice)
        self.made.append(event.compression)


def compressing_with(kept: SpeedFile, choices: Choices, codec: str = "auto") -> CodecSelection:
    settings = CompressionSettings.model_validate({"codec": codec})
    appliance = cast(Appliance, choices)
    return CodecSelection(settings, appliance, RecordCodecs({}), set, list, 2, kept)


def test_what_was_kept_is_read_again(tmp_path: Path) -> None:
    SpeedFile(tmp_path).write(SPEEDS)
    assert SpeedFile(tmp_path).read(CANDIDATES) == SPEEDS
    assert SpeedFile(tmp_path).read(("planes",)) == {("bfloat16", "planes"): 4e9}


def test_another_processor_or_version_begins_anew(tmp_path: Path) -> None:
    SpeedFile(tmp_path, "kvtier 1 on a").write(SPEEDS)
    assert SpeedFile(tmp_path, "kvtier 1 on b").read(CANDIDATES) == {}
    SpeedFile(tmp_path, "kvtier 1 on b").write({})
    assert SpeedFile(tmp_path, "kvtier 1 on a").read(CANDIDATES) == {}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[1, 2]",
        '{"s": 3}',
        '{"s": {"bfloat16": [1]}}',
        '{"s": {"bfloat16": {"exponents": "quick"}}}',
        '{"s": {"bfloat16": {"exponents": -1}}}',
        '{"s": {"bfloat16": {"exponents": NaN}}}',
        '{"s": {"bfloat16": {"exponents": Infinity}}}',
        '{"s": {"bfloat16": {"gzip": 1}, "fp64": {"exponents": 1}}}',
        "[" * 10_000,
        "\udcff",
    ],
)
def test_what_is_not_understood_is_as_if_it_were_not_there(tmp_path: Path, text: str) -> None:
    (tmp_path / NAME).write_bytes(text.encode(errors="surrogateescape"))
    assert SpeedFile(tmp_path, "s").read(CANDIDATES) == {}


def test_a_directory_that_is_gone_costs_nothing(tmp_path: Path) -> None:
    SpeedFile(tmp_path / "gone").write(SPEEDS)
    assert SpeedFile(tmp_path / "gone").read(CANDIDATES) == {}
    assert SpeedFile(None).read(CANDIDATES) == {}


def test_the_first_choice_of_a_daemon_that_starts_again_knows_the_speeds(tmp_path: Path) -> None:
    SpeedFile(tmp_path).write(SPEEDS)
    choices = Choices()
    again = compressing_with(SpeedFile(tmp_path), choices)
    assert choices.made[0].decode_speeds == SPEEDS
    assert again.speeds == SPEEDS


def test_expected_dtypes_are_measured_before_any_namespace_has_them_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And again where a figure was kept, which another load may have spoilt."""
    asked: list[tuple[str, str]] = []
    compiled: list[tuple[str, str]] = []

    async def compile_all(trials: list[tuple[str, str]]) -> None:
        compiled.extend(trials)

    def measured(name: str, dtype: str) -> float:
        asked.append((dtype, name))
        return 5e9

    monkeypatch.setattr(codec_selection, "compile_apart", compile_all)
    monkeypatch.setattr(codec_selection, "decode_speed", measured)
    SpeedFile(tmp_path).write({("bfloat16", "exponents"): 1.0})

    async def measure_once() -> Choices:
        choices = Choices()
        mine = compressing_with(SpeedFile(tmp_path), choices)
        mine.expect(frozenset({"bfloat16"}))
        task = asyncio.create_task(mine.run())
        while len(choices.made) < 2:
            await turns(1)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        return choices

    choices = run(measure_once())
    expected = {("bfloat16", name): 5e9 for name in CANDIDATES}
    assert choices.made[0].decode_speeds == {("bfloat16", "exponents"): 1.0}
    assert choices.made[1].decode_speeds == expected
    assert asked == sorted(expected)
    assert compiled == [(name, dtype) for dtype, name in asked]
    assert SpeedFile(tmp_path).read(CANDIDATES) == expected
    assert json.loads((tmp_path / NAME).read_text())


def test_nothing_is_measured_where_nobody_chooses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def compile_none(trials: list[tuple[str, str]]) -> None:
        raise AssertionError(f"{trials} were compiled")

    monkeypatch.setattr(codec_selection, "compile_apart", compile_none)

    async def begin() -> None:
        mine = compressing_with(SpeedFile(tmp_path), Choices(), "planes")
        mine.expect(frozenset({"bfloat16"}))
        task = asyncio.create_task(mine.run())
        await turns(20)
        assert not task.done()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    run(begin())
    assert not (tmp_path / NAME).exists()


def test_who_is_cancelled_while_it_is_written_waits_for_that(tmp_path: Path) -> None:
    """The next daemon may own the directory by then."""

    class Slow(SpeedFile):
        def __init__(self) -> None:
            super().__init__(tmp_path)
            self.began, self.may_end = threading.Event(), threading.Event()
            self.is_written = False

        def write(self, speeds: Mapping[tuple[str, str], float]) -> None:
            self.began.set()
            self.may_end.wait(60)
            super().write(speeds)
            self.is_written = True

    async def cancelled() -> None:
        kept = Slow()
        mine = compressing_with(kept, Choices())
        task = asyncio.create_task(mine._keep())
        await asyncio.to_thread(kept.began.wait, 60)
        task.cancel()
        await turns(5)
        assert not task.done()
        kept.may_end.set()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert kept.is_written

    run(cancelled())
