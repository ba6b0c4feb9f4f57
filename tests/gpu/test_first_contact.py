"""The driver of the first ten minutes on a GPU: whatever a step does to itself, the steps after it run and
two files come back that say so."""

import json
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.gpu import report
from tests.gpu.first_contact import (
    ARCHIVE,
    HEAD_BYTES,
    NEEDS_HARDWARE,
    SUMMARY,
    TAIL_BYTES,
    Step,
    run_all,
)
from tests.gpu.steps import steps_of

BUDGET_S = 120.0
LIMIT_S = 60.0
ROOT = Path(__file__).resolve().parents[2]


def python(name: str, code: str, limit_s: float = LIMIT_S, **options: Any) -> Step:
    return Step(name, (sys.executable, "-S", "-c", code, "{results}"), limit_s, **options)


AFTER = python("after", "print('it ran')")

#: what a step does -> (its code, limit in seconds, verdict, part of the reason, part of its log)
FAULTS: dict[str, tuple[str, float, str, str, bytes]] = {
    "exits 1": ("print('a reason'); raise SystemExit(1)", LIMIT_S, "failed", "exit code 1", b"a reason"),
    "hangs": (
        "import time; print('begun', flush=True); time.sleep(600)",
        1.5,
        "timed out",
        "not done in 2 s",
        b"begun",
    ),
    "segfaults": (
        "import ctypes, faulthandler; faulthandler.enable(); ctypes.string_at(0)",
        LIMIT_S,
        "failed",
        "SIGSEGV",
        b"Segmentation fault",
    ),
    "prints binary": (
        "import os; os.write(1, bytes(range(256)) * 9); os._exit(3)",
        LIMIT_S,
        "failed",
        "exit code 3",
        bytes(range(256)),
    ),
    "prints without end": (
        "import os\nfor _ in range(64): os.write(1, b'x' * (1 << 16))\nos.write(1, b'the end'); os._exit(4)",
        LIMIT_S,
        "failed",
        "exit code 4",
        b"bytes left out ...]",
    ),
    "leaves too much": (
        "import os, sys\nfor name in ('large', 'larger'):\n"
        " os.truncate(os.open(f'{sys.argv[1]}/{name}.json', os.O_CREAT | os.O_WRONLY), 64 << 20)\n"
        "open(f'{sys.argv[1]}/planted.json', 'w').write('[' + '1, ' * 200000 + '1]')\n"
        "print('no more room', flush=True); os._exit(5)",
        LIMIT_S,
        "failed",
        "exit code 5",
        b"no more room",
    ),
    "leaves a process": (
        "import subprocess, sys\n"
        "left = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(600)'])\n"
        "print('left', left.pid); raise SystemExit(6)",
        LIMIT_S,
        "failed",
        "exit code 6",
        b"left",
    ),
    "needs hardware": (
        f"print('no GPU'); raise SystemExit({NEEDS_HARDWARE})",
        LIMIT_S,
        "needs hardware",
        "it says so itself",
        b"no GPU",
    ),
    "cannot start": ("", LIMIT_S, "failed", "No such file", b"No such file"),
}


def returned(out: Path) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Return the summary and the archive's files; nothing else may be in `out`."""
    assert sorted(path.name for path in out.iterdir()) == sorted([ARCHIVE, SUMMARY])
    assert all(path.stat().st_size < 16 << 20 for path in out.iterdir())
    with tarfile.open(out / ARCHIVE) as archive:
        parts = {name: archive.extractfile(name) for name in archive.getnames()}
        files = {name: part.read() for name, part in parts.items() if part is not None}
    summary: dict[str, Any] = json.loads((out / SUMMARY).read_bytes())
    assert json.loads(files[SUMMARY])["steps"] == summary["steps"]
    return summary, files


def summary_of(steps: Sequence[Step], out: Path, **options: Any) -> tuple[dict[str, Any], dict[str, bytes]]:
    run_all(steps, out, options.get("budget_s", BUDGET_S), is_rehearsal=options.get("is_rehearsal", False))
    return returned(out)


def wait_until_gone(pid: int) -> None:
    """Wait until a process that was killed is no more, or is left to be reaped."""
    deadline_at = time.monotonic() + LIMIT_S
    while (status := Path(f"/proc/{pid}/stat")).exists() and status.read_text().split()[2] != "Z":
        assert time.monotonic() < deadline_at, "it lives on"
        time.sleep(0.01)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_step_s_end_is_its_own(fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, limit_s, verdict, reason, logged = FAULTS[fault]
    step = python("planted", code, limit_s)
    if fault == "cannot start":
        step = Step("planted", ("/nowhere/to/be/found",), limit_s)
    summary, files = summary_of([step, AFTER], tmp_path / "out")
    planted, after = summary["steps"]
    assert (planted["verdict"], after["verdict"]) == (verdict, "passed")
    assert reason in planted["reason"]
    assert logged in files["planted.log"]
    assert len(files["planted.log"]) <= HEAD_BYTES + TAIL_BYTES + 1000
    assert b"it ran" in files["after.log"]
    assert summary["left_out_of_archive"] == (
        ["large.json", "larger.json"] if fault == "leaves too much" else []
    )
    printed = capsys.readouterr().out
    assert f"{verdict:15}" in printed
    is_bad = verdict in ("failed", "timed out")
    assert ("    | " in printed) == is_bad
    if fault == "leaves too much":
        assert planted["left_out"] == ["planted.json: too large for the summary, see the archive"]
        assert len(json.loads(files["planted.json"])) == 200_001
    if fault == "leaves a process":
        wait_until_gone(int(files["planted.log"].split()[-1]))
    if fault == "prints without end":
        assert files["planted.log"].endswith(b"the end")
    assert not set(printed) & set("\x00\x07\x1b\x7f"), "a terminal may be harmed"


def test_a_fault_that_stays_in_a_process_does_not_reach_the_next(tmp_path: Path) -> None:
    """A sticky CUDA error lasts as long as its process; here it is a variable of the environment."""
    stick = python(
        "stick", "import os; os.environ['STUCK'] = '1'; raise SystemExit(int('STUCK' in os.environ))"
    )
    look = python("look", "import os; raise SystemExit(int('STUCK' in os.environ))")
    summary, _ = summary_of([stick, look], tmp_path)
    assert [step["verdict"] for step in summary["steps"]] == ["failed", "passed"]


FULL = """
import sys
from pathlib import Path
from tests.gpu.first_contact import Step, run_all
fill = "import os, tempfile\\nwith tempfile.TemporaryFile(buffering=0) as file:\\n" \
    " while True: file.write(bytes(1 << 16))"
steps = [
    Step("fill", (sys.executable, "-S", "-c", fill), 60.0),
    Step("after", (sys.executable, "-S", "-c", "print('it ran')"), 60.0),
]
run_all(steps, Path(sys.argv[1]), 100.0, False)
"""


def test_a_full_disk_costs_one_step(tmp_path: Path) -> None:
    """The temporary folder and OUT are on one file system of 2 MiB, in a mount namespace of our own."""
    disk = tmp_path / "disk"
    disk.mkdir()
    script = 'mount -t tmpfs -o size=2m none "$0" && TMPDIR="$0" "$1" -c "$2" "$0/out" && cp -r "$0/out" "$3"'
    command = ["unshare", "-rm", "sh", "-c", script, str(disk), sys.executable, FULL, str(tmp_path / "out")]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if "unshare:" in found.stderr or "mount:" in found.stderr:
        pytest.skip(f"no file system can be mounted here: {found.stderr}")
    assert found.returncode == 0, found.stderr
    summary, files = returned(tmp_path / "out")
    assert [step["verdict"] for step in summary["steps"]] == ["failed", "passed"]
    assert b"No space left on device" in files["fill.log"]


FULL_OUT = """
import sys
from pathlib import Path
from tests.gpu import first_contact
from tests.gpu.first_contact import Step
def step(name, code):
    return Step(name, (sys.executable, "-S", "-c", code, sys.argv[1]), 60.0)
grow = "import os, sys; print(os.urandom(60000).hex())" # does not compress: the archive has no room
steps = [step("before", "print('it ran')"), step("grow", grow), step("after", "print('it ran, too')")]
outcomes = first_contact.run_all(steps, Path(sys.argv[1]) / "out", 100.0, False)
raise SystemExit(first_contact.exit_code(outcomes))
"""


def test_a_full_out_folder_costs_the_file_that_has_no_room_and_says_so(tmp_path: Path) -> None:
    """OUT is a file system of 64 KiB, in a mount namespace of our own; the temporary folder has room."""
    disk = tmp_path / "disk"
    disk.mkdir()
    script = 'mount -t tmpfs -o size=64k none "$0" && { "$1" -c "$2" "$0"; rc=$?; cp -r "$0/out" "$3"; }'
    script += "; exit $rc"
    command = ["unshare", "-rm", "sh", "-c", script, str(disk), sys.executable, FULL_OUT]
    found = subprocess.run(
        [*command, str(tmp_path / "out")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    if "unshare:" in found.stderr or "mount:" in found.stderr:
        pytest.skip(f"no file system can be mounted here: {found.stderr}")
    assert found.returncode == 1, found.stderr
    assert f"{ARCHIVE}: No space left on device" in found.stdout
    assert "free room there and repeat with --only" in found.stdout
    out = tmp_path / "out"
    assert sorted(path.name for path in out.iterdir()) == sorted([ARCHIVE, SUMMARY])
    steps = json.loads((out / SUMMARY).read_bytes())["steps"]
    assert [(step["name"], step["verdict"]) for step in steps] == [
        ("before", "passed"),
        ("grow", "passed"),
        ("after", "passed"),
    ]
    with tarfile.open(out / ARCHIVE) as archive:  # whole, of the last step that found room
        assert sorted(archive.getnames()) == ["before.log", SUMMARY]


SANITIZER = """#!/bin/sh
# Behaves as NVIDIA documents compute-sanitizer: its lines are marked, the exit code is the command's unless
# that is 0 and errors were found.
[ "$1" = --error-exitcode ] || { echo "========= Error: unknown option $1"; exit 2; }
code=$2; shift 2
echo "========= COMPUTE-SANITIZER"
"$@"; rc=$?
case "$PLANTED" in
error) echo "========= Invalid __global__ write of size 4 bytes"
    echo "=========     at kvtier_copy_pieces+0x90"
    echo "=========     by thread (31,0,0) in block (0,0,0)"
    echo "========= ERROR SUMMARY: 2 errors"
    [ $rc = 0 ] && rc=$code;;
nothing) echo "========= Target application terminated before first instrumented API call";;
*) echo "========= ERROR SUMMARY: 0 errors";;
esac
exit $rc
"""


@pytest.mark.parametrize(
    ("planted", "device", "fails", "verdict", "words", "cell"),
    [
        ("", "fake", False, "passed", "", "clean"),
        ("error", "fake", False, "failed", "found 2 errors", "2 errors: Invalid __global__ write"),
        ("nothing", "fake", False, "needs hardware", "wrote no summary", None),
        ("nothing", "cuda", False, "failed", "wrote no summary", "no summary was written"),
        ("", "cuda", True, "failed", "ERROR SUMMARY: 0 errors", "clean"),
    ],
)
def test_what_compute_sanitizer_says_is_what_is_reported(
    planted: str,
    device: str,
    fails: bool,
    verdict: str,
    words: str,
    cell: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = tmp_path / "compute-sanitizer"
    program.write_text(SANITIZER)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("PLANTED", planted)
    [real] = [step for step in steps_of(device) if step.name == "sanitizer"]
    split = real.command.index("{results}/sanitizer.json") + 1
    tests = (sys.executable, "-S", "-c", f"raise SystemExit({int(fails)})")  # stands for the run of pytest
    step = replace(real, command=(*real.command[:split], *tests))
    summary, files = summary_of([step, AFTER], tmp_path / "out", is_rehearsal=device == "fake")
    [found, after] = summary["steps"]
    assert (found["verdict"], after["verdict"]) == (verdict, "passed")
    assert words in files["sanitizer.log"].decode()
    section = report.rendered([{"is_rehearsal": False, "steps": [found]}])
    [line] = [line for line in section.splitlines() if "| `sanitizer` |" in line]
    assert cell is None or cell in line
    assert verdict != "failed" or "**failed: exit code 1**" in line


def test_what_a_step_leaves_in_its_temporary_folder_is_gone_before_the_next(tmp_path: Path) -> None:
    leave = python(
        "leave", "import os; open(os.environ['TMPDIR'] + '/left', 'w'); print(os.environ['TMPDIR'])"
    )
    look = python(
        "look",
        "import os; up = os.path.dirname(os.environ['TMPDIR'])\n"
        "print(sorted(os.listdir(up)), os.listdir(os.environ['TMPDIR']))",
    )
    _, files = summary_of([leave, look], tmp_path)
    assert files["look.log"].strip().endswith(b"['results', 'scratch-look'] []")
    scratch = files["leave.log"].split()[-1].decode()
    assert not Path(scratch).parent.exists(), "the folder of all steps is removed at the end"


def test_what_is_not_begun_says_why(tmp_path: Path) -> None:
    steps = [
        python("lacks", "", needs="no-such-program"),
        python("hard", "", hardware="there is no device"),
        AFTER,
    ]
    summary, files = summary_of(steps, tmp_path, is_rehearsal=True)
    verdicts = [(step["verdict"], step["reason"]) for step in summary["steps"]]
    assert verdicts == [
        ("not installed", "no-such-program is not in PATH"),
        ("needs hardware", "there is no device"),
        ("passed", ""),
    ]
    assert sorted(files) == ["after.log", SUMMARY]
    summary, _ = summary_of([AFTER], tmp_path, budget_s=1.0)
    assert [step["verdict"] for step in summary["steps"]] == ["owed"]


def test_figures_that_are_broken_are_named(tmp_path: Path) -> None:
    broken = python("broken", "import sys; open(sys.argv[1] + '/broken.json', 'w').write('{')")
    summary, files = summary_of([broken], tmp_path)
    [step] = summary["steps"]
    assert (step["verdict"], step["figures"]) == ("passed", None)
    assert "cannot be read" in step["left_out"][0]
    assert files["broken.json"] == b"{"


def test_a_run_of_pytest_that_skips_all_has_shown_nothing(tmp_path: Path) -> None:
    suite = '<testsuites><testsuite tests="2" failures="0" errors="0" skipped="2"/></testsuites>'
    skips = python("skips", f"import sys; open(sys.argv[1] + '/skips.xml', 'w').write({suite!r})")
    summary, _ = summary_of([skips], tmp_path)
    assert summary["steps"][0]["verdict"] == "needs hardware"
    assert summary["steps"][0]["figures"] == {"tests": 2, "failures": 0, "errors": 0, "skipped": 2}


def test_the_order_and_the_limits_on_a_gpu() -> None:
    steps = {step.name: step for step in steps_of("cuda")}
    wanted = ["attributes", "kernels-once", "contracts", "across", "shared", "hbm", "kernels", "quantised"]
    wanted += ["batches", "killed", "pages-warm", "pages-straight", "sweep", "device", "cold-tests", "cold"]
    assert [name for name in steps if name in wanted] == wanted
    late = wanted.index("killed") + 1
    assert {steps[name].limit_s for name in wanted[:late]} == {45}
    assert {steps[name].limit_s for name in wanted[late:]} == {60}
    assert list(steps) == [step.name for step in steps_of("fake")]
    for step in steps.values():
        assert ("pytest" in step.command) <= ({"--timeout=45", "default"} <= set(step.command))


def test_one_step_rehearsed_and_rendered(tmp_path: Path) -> None:
    """The command that is given on a GPU machine, for one of its steps, on the fake device."""
    out = tmp_path / "out"
    with zipfile.ZipFile(tmp_path / "brought-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("sitecustomize.py", "import sys; print('from the wheel', file=sys.stderr)")
    command = ["tests/gpu/run.sh", str(out), "--device", "fake", "--only", "shared"]
    environment = {"PATH": "/usr/bin:/bin", "PYTHON": sys.executable, "WHEELS": str(tmp_path)}
    found = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert found.returncode == 0, found.stdout + found.stderr
    assert "from the wheel" in found.stderr
    summary, files = returned(out)
    assert b"from the wheel" in files["shared.log"]
    assert summary["is_rehearsal"]
    section = report.rendered([summary])
    assert "| `shared` | same bytes twice: True |" in section
    assert f"1 of {len(report.FIGURES)} figures are measured, {len(report.FIGURES) - 1} are owed." in section


def test_the_page_has_every_figure_and_is_rewritten_between_its_marks(tmp_path: Path) -> None:
    page = tmp_path / "gpu.md"
    page.write_text(report.PAGE.read_text())
    for figure in report.FIGURES:
        assert f"| {figure.name} | {figure.bar} | `{figure.step}` |" in page.read_text()
    failed = {"name": "batches", "verdict": "failed", "reason": "exit code 1", "figures": None}
    text = report.rendered([{"is_rehearsal": False, "steps": [failed]}])
    before = page.read_text().partition(report.BEGIN)[0]
    report.write(text, page)
    report.write(text, page)
    assert page.read_text().count("**failed: exit code 1**") == 1
    assert page.read_text().startswith(before)
    assert page.read_text().endswith(report.PAGE.read_text().partition(report.END)[2])


def test_a_step_that_is_repeated_replaces_what_it_was(tmp_path: Path) -> None:
    def summary(verdict: str) -> dict[str, Any]:
        step = {"name": "kernels", "verdict": verdict, "reason": "exit code 1"}
        return {"steps": [{**step, "figures": {"tests": 4, "failures": 0, "errors": 0, "skipped": 0}}]}

    cell = "4 passed, 0 failed, 0 skipped"
    for verdicts in (["failed", "passed"], ["passed", "owed"]):
        section = report.rendered([summary(verdict) for verdict in verdicts])
        assert f"| `kernels` | {cell} |" in section
    assert f"**failed: exit code 1** {cell}" in report.rendered([summary("failed")])


def test_a_rehearsal_is_not_written_to_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / SUMMARY
    path.write_text(json.dumps({"is_rehearsal": True, "steps": []}))
    before = report.PAGE.read_bytes()
    assert report.main([str(path)]) == 0
    assert report.PAGE.read_bytes() == before
    assert "mean nothing" in capsys.readouterr().out
