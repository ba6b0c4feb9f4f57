"""When codecs are measured: once for each dtype that is expected or stored, and only where speed decides."""

import asyncio
import contextlib
from typing import cast

import pytest

from kvtier.appliance.appliance import Appliance
from kvtier.appliance.compression import codec_choice
from kvtier.appliance.compression.codec_choice import CodecChoice, CodecSelection
from kvtier.appliance.config import CompressionSettings
from kvtier.appliance.core.events import CompressionChosen
from kvtier.tiers.codecs.records import RecordCodecs
from kvtier.tiers.codecs.streaming import CANDIDATES
from tests.appliance.loops import run, turns


class Choices:
    """What a planner is told."""

    def __init__(self) -> None:
        self.made: list[CodecChoice] = []

    def step(self, event: CompressionChosen) -> None:
        assert isinstance(event.compression, CodecChoice)
        self.made.append(event.compression)


def selection(choices: Choices, codec: str = "auto") -> CodecSelection:
    settings = CompressionSettings.model_validate({"codec": codec})
    return CodecSelection(settings, cast(Appliance, choices), RecordCodecs({}), set, list, 2)


async def stop(task: "asyncio.Task[None]") -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


def test_expected_dtypes_are_measured_before_any_namespace_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []
    compiled: list[tuple[str, str]] = []

    async def compile_all(trials: list[tuple[str, str]]) -> None:
        compiled.extend(trials)

    def measured(name: str, dtype: str) -> float:
        asked.append((dtype, name))
        return 5e9

    monkeypatch.setattr(codec_choice, "compile_apart", compile_all)
    monkeypatch.setattr(codec_choice, "decode_speed", measured)

    async def measure_once() -> tuple[Choices, CodecSelection]:
        choices = Choices()
        mine = selection(choices)
        mine.expect(frozenset({"bfloat16"}))
        task = asyncio.create_task(mine.run())
        while len(choices.made) < 2:
            await turns(1)
        await stop(task)
        return choices, mine

    choices, mine = run(measure_once())
    expected = {("bfloat16", name): 5e9 for name in CANDIDATES}
    assert [choice.decode_speeds for choice in choices.made] == [{}, expected]
    assert mine.speeds == expected
    assert asked == sorted(expected)
    assert compiled == [(name, dtype) for dtype, name in asked]


def test_a_codec_that_is_named_is_run_once_so_that_its_loops_are_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []

    async def compile_nothing(trials: list[tuple[str, str]]) -> None:
        pass

    def measured(name: str, dtype: str) -> float:
        asked.append(name)
        return 5e9

    monkeypatch.setattr(codec_choice, "compile_apart", compile_nothing)
    monkeypatch.setattr(codec_choice, "decode_speed", measured)

    async def begin() -> None:
        choices = Choices()
        mine = selection(choices, "planes")
        mine.expect(frozenset({"bfloat16"}))
        task = asyncio.create_task(mine.run())
        while len(choices.made) < 2:
            await turns(1)
        await stop(task)

    run(begin())
    assert asked == ["planes"]


def test_nothing_is_measured_where_a_codec_is_named_that_loads_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def compile_none(trials: list[tuple[str, str]]) -> None:
        raise AssertionError(f"{trials} were compiled")

    monkeypatch.setattr(codec_choice, "compile_apart", compile_none)

    async def begin() -> None:
        mine = selection(Choices(), "zstd")
        mine.expect(frozenset({"bfloat16"}))
        task = asyncio.create_task(mine.run())
        await turns(20)
        assert not task.done()
        await stop(task)

    run(begin())
