"""Chaos sees what is broken; `make chaos` runs the long one."""

from pathlib import Path

import pytest

from . import __main__ as chaos
from .breaks import BREAKS, FLEET_BREAKS, ROOT, Break, planted
from .content import NUM_WORDS, payload_of, wrong_words

SECONDS = 5.0


@pytest.mark.parametrize("one", BREAKS + FLEET_BREAKS, ids=lambda one: one.name)
def test_a_defect_fits_the_code_that_it_breaks(one: Break, tmp_path: Path) -> None:
    with planted(one.name, tmp_path):
        assert (tmp_path / "broken" / one.file).read_text() != (ROOT / one.file).read_text()


def test_any_wrong_word_shows() -> None:
    words = payload_of(1, 5)
    assert wrong_words(words, 1, 5) == ""
    assert "65536 of 65536 words" in wrong_words(words, 0, 5)
    words[NUM_WORDS - 1] += 1
    assert "1 of 65536 words are wrong, the first at 65535" in wrong_words(words, 1, 5)


def test_a_planted_defect_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what is not broken passes with the same faults."""
    monkeypatch.setenv("KVTIER_TOKEN_FILE", "")  # chaos changes it
    only = ["kill a client that holds leases"]
    (tmp_path / "whole").mkdir()
    counts = chaos.Chaos(tmp_path / "whole", seed=1, pause_s=0.01).run(SECONDS, only)
    assert counts["blocks verified"] > 0
    (tmp_path / "broken").mkdir()
    with planted("leases-outlive-clients", tmp_path / "broken"):
        broken = chaos.Chaos(tmp_path / "broken", seed=1, pause_s=0.01)
        monkeypatch.setattr(chaos, "QUIET_S", 3.0)
        with pytest.raises(AssertionError, match="left by dead clients"):
            broken.run(SECONDS, only)
