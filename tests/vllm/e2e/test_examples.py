"""The examples run, and what they print says that something was gained."""

import os
import re
import subprocess
import sys

import pytest

from bench.machine import ROOT

from .rig import FULL

LIMIT_S = 1500.0
needs_time = pytest.mark.skipif(
    not FULL, reason="each starts vLLM's server once or twice: FULL=1 make test-vllm"
)


def run(name: str) -> str:
    command = [sys.executable, "-m", f"examples.vllm.{name}"]
    ended = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, env=dict(os.environ)
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    print(f"\n{ended.stdout}")
    return ended.stdout


@needs_time
def test_chat() -> None:
    (found,) = re.findall(r"([\d,]+) tokens came from the appliance", run("chat"))
    assert int(found.replace(",", "")) > 1000


@needs_time
def test_agents() -> None:
    text = run("agents")
    held, shared = re.findall(r"holds (\d+) blocks; one prompt has (\d+)", text)[0]
    assert int(held) <= int(shared) + 1
    assert not re.search(r"found 0 of", text)


@needs_time
def test_restart() -> None:
    text = run("restart")
    assert text.count("the same") == 3
    assert "DIFFERENT" not in text
    cached = re.findall(r"([\d,]+)  the same", text)
    assert all(int(number.replace(",", "")) > 0 for number in cached)
