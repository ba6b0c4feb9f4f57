"""Every figure of README, status and comparison stands in the ledger, and the ledger can be run."""

import importlib.util
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from . import rerun
from .ledger import CITING, ROOT, Claim, Figure, Run, cited, load, missing, save
from .page import claims_page

CLAIMS = load()
OURS = [claim for claim in CLAIMS if not claim.source]


@pytest.mark.parametrize("page", CITING)
def test_every_figure_of_a_page_stands_in_the_ledger(page: str) -> None:
    assert missing((ROOT / page).read_text(), CLAIMS) == []


def test_a_figure_that_nobody_claims_is_found() -> None:
    text = "It is 3.3 × as fast, 9.99 × with luck, in 12,345 runs at 7 to 8 GB/s; `4 ×` [a](b%20c)"
    assert cited(text) == ["3.3 ×", "9.99 ×", "12,345", "7 to 8 GB/s"]
    assert missing(text, CLAIMS) == ["12,345", "7 to 8 GB/s", "9.99 ×"]


@pytest.mark.parametrize("claim", OURS, ids=lambda claim: claim.name)
def test_a_claim_can_be_checked(claim: Claim) -> None:
    """It has a run, a module that can be run, a page with the table, and no figures beside its own."""
    assert claim.false_if
    assert claim.runs
    assert (ROOT / "docs" / claim.page.partition("#")[0]).exists()
    words = shlex.split(claim.command)
    assert words[0] == "kvtier" or importlib.util.find_spec(words[2]) is not None
    shown = {name for run in claim.runs for name in run.shown}
    assert shown <= {figure.name for figure in claim.figures}
    assert not claim.figures or claim.minutes
    assert not claim.minutes or claim.figures


def test_every_commit_of_a_run_is_of_this_repository() -> None:
    def known(commit: str) -> bool:
        command = ["git", "merge-base", "--is-ancestor", commit.rstrip("+"), "HEAD"]
        return subprocess.run(command, cwd=ROOT, capture_output=True).returncode == 0

    if not (ROOT / ".git").exists() or not known("8288ff67c9"):
        pytest.skip("no clone with the whole history")
    assert [run.commit for claim in OURS for run in claim.runs if not known(run.commit)] == []


def test_the_ledger_is_written_as_it_is_read(tmp_path: Path) -> None:
    save(CLAIMS, tmp_path / "claims.json")
    assert load(tmp_path / "claims.json") == CLAIMS


@pytest.fixture(autouse=True)
def _own_failures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rerun, "FAILURES", tmp_path / "cache" / "failed.json")


def a_claim(command: str, minutes: int = 1, date: str = "2026-01-01") -> Claim:
    figures = (Figure("speed", r"speed ([\d.,]+)", "min", 2.0, 3000.0),)
    return Claim(
        command, "3 ×", "x.md", "it is not", command, minutes, figures=figures, runs=(Run(date, "abc", "m"),)
    )


def test_a_run_reads_its_figures_and_marks_drift() -> None:
    ran = rerun.run(a_claim("python -c print('speed',2.5,'speed','1,000')"))
    assert ran.runs[-1].shown == {"speed": 2.5}
    assert ran.drifted() == []
    drifted = rerun.run(a_claim("python -c print('speed',1.5)"))
    assert drifted.drifted() == ["speed 1.5 (claimed 2 to 3000)"]


def test_a_failing_command_adds_no_run(capsys: pytest.CaptureFixture[str]) -> None:
    claims = [a_claim("python -c print(1)"), a_claim("python -c 1/0"), a_claim("python $NO_SUCH/x")]
    after, not_run, failed = rerun.run_all(claims, claims, 60, lambda _: pytest.fail("nothing ran"))
    assert after == claims
    assert [line.partition(":")[2].split()[0] for line in failed] == ["speed:", "exit"]
    assert [line.partition(":")[2].split()[0] for line in not_run] == ["set"]
    printed = capsys.readouterr().out
    assert printed.count("FAILED") == 2
    assert printed.count("not run") == 1


def test_what_failed_does_not_come_first_again() -> None:
    """Else a call that has little time begins with the same failures for ever."""
    failing, able = a_claim("python -c 1/0", date="2026-01-01"), a_claim("b", date="2026-02-01")
    assert rerun.left_to_run([failing, able], "def") == [failing, able]
    rerun.run_all([failing, able], [failing], 60, lambda _: None)
    assert rerun.left_to_run([failing, able], "def") == [able, failing]


def test_a_command_that_does_not_end_is_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rerun, "SPARE_S", 0.2)
    with pytest.raises(ValueError, match="did not end within 0 s"):
        rerun.run(replace(a_claim("python -c __import__('time').sleep(60)"), minutes=0))


def test_what_was_run_longest_ago_comes_first() -> None:
    old, young = a_claim("a", 40, "2026-01-01"), a_claim("b", 40, "2026-02-01")
    never = a_claim("d", 0)
    assert rerun.left_to_run([young, old, never], "def") == [old, young]
    assert rerun.left_to_run([young, old, never], "abc") == []
    changed = replace(old, runs=(Run("2026-01-01", "abc+", "m"),))
    assert rerun.left_to_run([changed], "abc+") == [changed]


def test_what_ended_is_kept_and_none_begins_that_has_no_time(capsys: pytest.CaptureFixture[str]) -> None:
    kept: list[list[Claim]] = []
    first = a_claim("python -c print('speed',3)")
    second, long = replace(first, name="second"), replace(first, name="long", minutes=61)
    all_three = [first, long, second]
    after, not_run, _ = rerun.run_all(all_three, all_three, 60, kept.append)
    assert [len(one.runs) for one in after] == [2, 1, 2]
    assert [[len(one.runs) for one in state] for state in kept] == [[2, 1, 1], [2, 1, 2]]
    assert [line.partition(":")[0] for line in not_run] == ["long"]
    assert "goes on here" in capsys.readouterr().out


def test_what_cannot_run_here_leaves_its_time_to_the_others() -> None:
    lacking, able = a_claim("python $NO_SUCH/x", 40), a_claim("python -c print('speed',3)", 40)
    after, not_run, _ = rerun.run_all([lacking, able], [lacking, able], 60, lambda _: None)
    assert [len(one.runs) for one in after] == [1, 2]
    assert len(not_run) == 1


def test_the_page_has_a_section_for_each_claim() -> None:
    ((_, content),) = claims_page()
    for claim in CLAIMS:
        assert claim.claim in content.decode()
    assert replace(OURS[0], figures=()).drifted() == []
