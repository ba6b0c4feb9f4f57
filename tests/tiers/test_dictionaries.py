"""Dictionaries of zstd: records name theirs, are read with it, and are a miss, not a loss, without it."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import zstandard
from click.testing import CliRunner

from kvtier.appliance.cli.app import cli
from kvtier.appliance.config import CompressionSettings
from kvtier.appliance.dictionaries import adopt_zstd_again, read_zstd
from kvtier.appliance.errors import StartError
from kvtier.appliance.forward import ForwardCopier
from kvtier.tiers.base import Cause, CopyItem
from kvtier.tiers.codecs.base import CodecError, CodecMissing
from kvtier.tiers.codecs.dictionaries import (
    DictionaryError,
    read_dictionaries,
    read_dictionary,
    train,
)
from kvtier.tiers.codecs.general import Zstd
from tests.tiers.cold import cold
from tests.tiers.test_cold_encoded import SHAPE, label_of, write

WORDS = [np.random.default_rng(seed).bytes(48) for seed in range(40)]


def payload(seed: int) -> bytes:
    """Return a payload that repeats phrases which every payload has."""
    rng = np.random.default_rng(seed)
    picked = b"".join(WORDS[i] for i in rng.integers(0, len(WORDS), SHAPE.raw_bytes // 48 + 1))
    return picked[: SHAPE.raw_bytes]


def pieces(*, reverse: bool = False) -> list[bytes]:
    """Return samples."""
    whole = [payload(seed)[:: -1 if reverse else 1] for seed in range(16)]
    return [one[start : start + 4096] for one in whole for start in range(0, len(one), 4096)]


@pytest.fixture(scope="module")
def trained() -> bytes:
    return train(pieces(), 4096)


def settings(folder: Path, name: str = "") -> CompressionSettings:
    return CompressionSettings.model_validate({"dictionaries": folder, "zstd_dictionary": name})


def test_a_record_needs_the_dictionary_it_was_made_with(tmp_path: Path, trained: bytes) -> None:
    folder, store = tmp_path / "dictionaries", tmp_path / "cold"
    folder.mkdir()
    store.mkdir()
    (folder / "phrases.zdict").write_bytes(trained)
    label = label_of(1, payload(1), "zstd")
    with cold(store) as opened, ThreadPoolExecutor(1) as pool:
        codecs = opened.store.codecs
        codecs.adopt_zstd(read_zstd(settings(folder, "phrases")))
        assert write(opened, [(label, payload(1))]) == [None]
        (place,) = opened.accepted
        opened.assert_readable()
        codecs.adopt_zstd(read_zstd(settings(folder)))  # not written with any more: still read with
        opened.assert_readable()
        codecs.adopt_zstd(Zstd())
        assert opened.get(place, label) is Cause.UNREADABLE
        target = opened.room.reserve(0, label.stored_length)
        assert target is not None
        copied = ForwardCopier(opened.store, pool).start([CopyItem(place, target, label)]).result()
        opened.room.settle(target)
        assert copied[0].cause is None
        codecs.adopt_zstd(read_zstd(settings(folder)))
        assert opened.get(target, label) == payload(1)
        opened.seal()
    with cold(store) as again:
        assert again.get(target, label) is Cause.UNREADABLE
        adopt_zstd_again(again.store.codecs, settings(folder))
        assert again.get(target, label) == payload(1)
        adopt_zstd_again(again.store.codecs, settings(folder, "no such"))  # what was known stays
        assert again.get(target, label) == payload(1)


def test_a_frame_of_another_dictionary_is_no_frame_of_this_one(trained: bytes) -> None:
    other = train(pieces(reverse=True), 4096)
    ours, theirs = (zstandard.ZstdCompressionDict(one) for one in (trained, other))
    assert ours.dict_id() != theirs.dict_id()
    stored, into = bytearray(SHAPE.raw_bytes), bytearray(SHAPE.raw_bytes)
    length = Zstd(dictionary=ours).encode(SHAPE, memoryview(payload(2)), memoryview(stored))
    plain = Zstd().encode(SHAPE, memoryview(payload(2)), memoryview(bytearray(SHAPE.raw_bytes)))
    assert length < plain
    with pytest.raises(CodecMissing, match=r"put its file back into the directory compression\.dictionaries"):
        Zstd(dictionaries={theirs.dict_id(): theirs}).decode(SHAPE, memoryview(stored), memoryview(into))
    with pytest.raises(CodecError):
        Zstd(dictionaries={ours.dict_id(): theirs}).decode(SHAPE, memoryview(stored), memoryview(into))
    Zstd(dictionaries={ours.dict_id(): ours}).decode(SHAPE, memoryview(stored), memoryview(into))
    assert into == payload(2)


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda content: b"no" + content[2:], "is no zstd dictionary"),
        (lambda content: content[:-1] + b"?", "was changed"),
        (lambda content: content[:6], "is no zstd dictionary"),
    ],
)
def test_a_file_that_is_wrong_says_so(
    tmp_path: Path, trained: bytes, damage: Callable[[bytes], bytes], why: str
) -> None:
    (tmp_path / "a.zdict").write_bytes(damage(trained))
    with pytest.raises(DictionaryError, match=why):
        read_dictionary(tmp_path / "a.zdict")
    with pytest.raises(StartError, match=r"compression\.dictionaries"):
        read_zstd(settings(tmp_path))


def test_the_same_dictionary_under_two_names_is_one(tmp_path: Path, trained: bytes) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.zdict").write_bytes(trained)
    assert set(read_dictionaries(tmp_path)) == {"a", "b"}
    with pytest.raises(StartError, match=r"there is no 'c' in compression\.dictionaries \(a, b\)"):
        read_zstd(settings(tmp_path, "c"))


def test_levels_are_read_alike() -> None:
    lengths = []
    for level in (1, 19):
        stored, into = bytearray(SHAPE.raw_bytes), bytearray(SHAPE.raw_bytes)
        lengths.append(Zstd(level).encode(SHAPE, memoryview(payload(3)), memoryview(stored)))
        Zstd().decode(SHAPE, memoryview(stored), memoryview(into))
        assert into == payload(3)
    assert lengths[1] <= lengths[0]


def test_the_command(tmp_path: Path) -> None:
    for seed in range(8):
        (tmp_path / f"{seed}.bin").write_bytes(payload(seed))
    samples = [str(path) for path in sorted(tmp_path.glob("*.bin"))]
    out = tmp_path / "phrases.zdict"
    command = [
        "dictionary",
        "train",
        *samples,
        "--out",
        str(out),
        "--bytes",
        "4096",
        "--sample-bytes",
        "4096",
    ]
    assert CliRunner().invoke(cli, command).exit_code == 0
    assert set(read_dictionaries(tmp_path)) == {"phrases"}
    wrong = CliRunner().invoke(cli, ["dictionary", "train", samples[0], "--out", str(tmp_path / "a.bin")])
    assert wrong.exit_code == 2
