"""Where figures were taken: said wherever they can be taken."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_a_checkout_that_is_not_installed(tmp_path: Path) -> None:
    """As on a machine with a GPU that is lent for minutes: the checkout, and nothing installed."""
    (tmp_path / "bench").mkdir()
    for name in ("__init__.py", "machine.py"):
        (tmp_path / "bench" / name).write_bytes((ROOT / "bench" / name).read_bytes())
    code = "from bench.machine import describe; print(describe({'peer': '1'})['versions'])"
    found = subprocess.run(
        [sys.executable, "-S", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert found.stdout == "kvtier not installed, peer 1\n"
