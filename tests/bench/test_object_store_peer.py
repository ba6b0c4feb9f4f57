"""The comparison over an object store: what its table says where a contender gave no figure."""

import sys
from pathlib import Path

import pytest

from bench import object_store_peer
from bench.object_store_peer import Row, cells


def test_a_contender_without_a_figure_says_why() -> None:
    assert cells(Row("LMCache", 2048, problem="not run: no interpreter"))[:3] == [
        "2048",
        "LMCache",
        "not run: no interpreter",
    ]
    failed_later = Row("LMCache", 2048, [0.1], [6], [1 << 20], problem="get: 1 of 2048 tokens, right: False")
    assert failed_later.problem in cells(failed_later), "a contender that failed once has no median"


def test_figures_are_medians_with_their_range() -> None:
    row = Row("kvtier", 8192, [0.3, 0.1, 0.2], [6, 6, 7], [1 << 20] * 3)
    assert cells(row) == ["8192", "kvtier", "0.20", "0.10 to 0.30", "6", "1"]


@pytest.mark.parametrize("tokens", ["100", "0", "2048,-256"])
def test_a_prompt_is_whole_bundles(tokens: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", "--tokens", tokens, "--lmcache", str(Path("none"))])
    with pytest.raises(SystemExit) as ended:
        object_store_peer.main()
    assert ended.value.code == 2
