"""Output that cannot be written, terminals that know ASCII only, exit codes, and empty policy files."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvtier.appliance import cli
from kvtier.appliance.host import process

from .conftest import ScriptedAdmin, run

ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def started(*words: str, stdout: int, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """Run the program itself, because click's test runner has a stdout of its own."""
    return subprocess.run(
        [sys.executable, "-m", "kvtier", *words],
        stdout=stdout,
        stderr=subprocess.PIPE,
        env={**os.environ, **environment},
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("words", [("--version",), ("policy", "schema"), ("status",), ("status", "--json")])
def test_output_that_cannot_be_written_is_one_line_and_exit_code_1(
    words: tuple[str, ...], scripted: ScriptedAdmin, target: str
) -> None:
    with open("/dev/full", "wb") as full:
        done = started(*words, stdout=full.fileno(), KVTIER_TARGET=target)
    assert done.returncode == cli.EXIT_FAILED
    assert done.stderr.decode() == "Error: the output cannot be written: No space left on device\n"


@pytest.mark.parametrize("words", [("policy", "schema"), ("status",), ("policy", "--help")])
def test_a_terminal_that_knows_ascii_only_gets_ascii(
    words: tuple[str, ...], scripted: ScriptedAdmin, target: str
) -> None:
    done = started(*words, stdout=subprocess.PIPE, KVTIER_TARGET=target, **ASCII)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.isascii()


def test_json_for_ascii_loses_nothing(scripted: ScriptedAdmin, target: str) -> None:
    answers = [
        json.loads(started("status", "--json", stdout=subprocess.PIPE, KVTIER_TARGET=target, **locale).stdout)
        for locale in (ASCII, {})
    ]
    assert answers[0] == answers[1]


def test_the_main_help_lists_every_exit_code() -> None:
    codes = {value for name, value in vars(cli).items() if name.startswith("EXIT_")}
    codes |= {value for name, value in vars(process).items() if name.startswith("EXIT_")}
    lines = run("--help").stdout.splitlines()
    listed = {int(line.split()[0]) for line in lines if line.strip()[:1].isdigit()}
    assert listed == codes
    assert "xit code" not in run("serve", "--help").stdout, "they are told in one place"


@pytest.mark.parametrize("text", ["", "# nothing yet\n", "{}\n"])
def test_an_empty_policy_file_is_said_to_mean_the_defaults(text: str, tmp_path: Path) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text(text)
    said = f"{file}: sets nothing; built-in defaults are used"
    for words in (("policy", "validate"), ("serve", "--check", "--policy")):
        result = run(*words, str(file))
        assert (result.exit_code, result.stderr) == (0, f"Warning: {said}\n")
    answer = json.loads(run("policy", "validate", "--json", str(file)).stdout)
    assert [warning["sentence"] for warning in answer["warnings"]] == [said.partition(": ")[2]]
    file.write_text("leases: {ttl: 20s}")
    assert run("serve", "--check", "--policy", str(file), "--set", "leases.ttl=9s").stderr == ""


def test_an_override_that_is_refused_is_named_once() -> None:
    result = run("serve", "--check", "--listen", "x")
    assert result.exit_code == cli.EXIT_USAGE
    assert result.stderr.startswith("Error: --set listen: 'x' is not an address")


def test_commands_that_ask_a_daemon_load_no_settings() -> None:
    """They are called in scripts and prompts, and on hosts that have a client's libraries only."""
    code = (
        "import sys; from kvtier.appliance.cli import evict, status, story, top, why; "
        "print([name for name in ('pydantic', 'zstandard', 'lz4') if name in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout.strip() == "[]"
