"""`make demo-fleet` as a process: hosts answer from each other's memory, bit for bit, and it exits with 0."""

import importlib.util
import re
import subprocess
import sys

import pytest

from examples.network import why_not
from tests.distributions import ROOT

if importlib.util.find_spec("transformers") is None:
    pytest.skip("no transformers: `make demo-fleet` installs them", allow_module_level=True)

ROW = re.compile(r"^(\w+) +1 +[\d,]+ +([\d,]+) .*  identical$", re.MULTILINE)


def test_hosts_read_from_each_other_and_compute_when_they_are_cut_off() -> None:
    if why := why_not():
        pytest.skip(why)
    done = subprocess.run(
        [sys.executable, "-m", "examples.demo_fleet"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "logits bit for bit" in done.stdout
    acts = re.split(r"^\d\. ", done.stdout, flags=re.MULTILINE)[1:]
    found = [[int(one.replace(",", "")) for _, one in ROW.findall(act)] for act in acts]
    assert found == [[0, 1792, 1792], [2176] * 3, [0], [2176] * 2]
