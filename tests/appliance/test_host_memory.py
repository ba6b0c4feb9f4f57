"""A daemon that cannot have its memory does not start, and takes none of it."""

from pathlib import Path

import pytest

from kvtier.appliance import host_memory
from kvtier.appliance.assembly import assemble
from kvtier.appliance.errors import StartError
from kvtier.appliance.settings import Settings

from .conftest import small_settings


def wanting(folder: Path, capacity: str, hugepages: str = "off") -> Settings:
    tiers = {"dram": {"capacity": capacity, "extent": "64MiB", "hugepages": hugepages}}
    return Settings.model_validate({"listen": [f"unix://{folder}/k.sock"], "tiers": tiers})


def test_more_than_there_is_is_refused_before_it_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 1 << 30)
    with pytest.raises(StartError, match=r"would take 1\.\d+ GiB, 1 GiB are available; lower"):
        assemble(wanting(tmp_path, "1.5GiB"), epoch=1)
    host_memory.require_memory(wanting(tmp_path, "960MiB"))


def test_huge_pages_come_on_top(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 1 << 30)
    monkeypatch.setattr(host_memory, "read_number", lambda path: 512)
    host_memory.require_memory(wanting(tmp_path, "1.5GiB", "auto"))
    with pytest.raises(StartError, match="1 GiB are available"):
        host_memory.require_memory(wanting(tmp_path, "1.5GiB", "off"))


def test_what_fits_starts(tmp_path: Path) -> None:
    assemble(small_settings(tmp_path), epoch=1).close()
