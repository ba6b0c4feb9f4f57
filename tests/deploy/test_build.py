"""`make image`, as far as it goes without building one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.docker import build_image
from tests.deploy.test_image import ROOT

SCRIPT = ROOT / "deploy" / "docker" / "build_image.py"


@pytest.mark.parametrize(
    ("arguments", "programs"), [((), "buildah"), (("--base", "debian"), "buildah mmdebstrap")]
)
def test_what_is_missing_is_said_in_one_line(
    tmp_path: Path, arguments: tuple[str, ...], programs: str
) -> None:
    command = [sys.executable, str(SCRIPT), *arguments, str(tmp_path)]
    environment = {**os.environ, "PATH": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == f"make image needs root and: apt-get install {programs}\n"
    assert list(tmp_path.iterdir()) == []


def test_pip_inside_looks_where_pip_outside_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its options, of file and environment, are written; files and folders that they name are mounted."""
    index, wheels, certificate = tmp_path / "index" / "simple", tmp_path / "wheels", tmp_path / "ca.crt"
    index.mkdir(parents=True)
    wheels.mkdir()
    certificate.touch()
    config = tmp_path / "outside.conf"
    config.write_text(
        "[global]\nindex-url = https://pypi.example.com/simple\nquiet = 1\n"
        f"extra-index-url =\n    file://{index}\n    https://more.example.com/simple\n"
        f"cert = {certificate}\n"
    )
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(config))
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("PIP_INDEX_URL", "https://mirror.example.com/simple")
    inside = tmp_path / "inside"
    inside.mkdir()
    options = build_image.pip_mounts(inside)
    mounts = {option for option in options if option != "--volume"}
    # The folder above an index, where its packages are.
    wanted = {f"{path}:{path}:ro" for path in (index.parent, wheels, certificate)}
    assert mounts >= {*wanted, f"{inside / 'pip.conf'}:/etc/pip.conf:ro"}
    written = (inside / "pip.conf").read_text()
    assert "index-url = https://mirror.example.com/simple\n" in written
    assert f"extra-index-url = file://{index}\n    https://more.example.com/simple\n" in written
    assert "quiet" not in written
