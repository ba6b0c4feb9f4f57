"""docs/operate/docker.md: its commands, run with podman for `docker`."""

import os
import shlex
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.test_image import ROOT
from tests.docs.commands import HTTP, commands_of, is_seen

from .engine import COMMAND_S, Engine

PAGE = ROOT / "docs" / "operate" / "docker.md"


@pytest.fixture
def checkout(engine: Engine, tmp_path: Path) -> Iterator[Path]:
    """What the page uses of a checkout, with tiers that any machine has room for; and a program `docker`."""
    (tmp_path / "dist").mkdir()
    archive = Path(os.environ["KVTIER_IMAGE"]).resolve()
    (tmp_path / "dist" / archive.name).symlink_to(archive)
    policy = tmp_path / "deploy" / "compose" / "policy.yaml"
    policy.parent.mkdir(parents=True)
    text = (ROOT / "deploy" / "compose" / "policy.yaml").read_text()
    small = text.replace("capacity: 4GiB", "capacity: 256MiB").replace("capacity: 32GiB", "capacity: 512MiB")
    assert small.count("MiB") == 2
    policy.write_text(small)
    docker = tmp_path / "bin" / "docker"
    docker.parent.mkdir()
    docker.write_text(engine.as_a_program())
    docker.chmod(0o755)
    yield tmp_path
    engine.do("rm", "--all", "--force", "--time", "0", check=False)
    engine.do("volume", "rm", "--all", "--force", check=False)


def test_the_commands_of_the_page_do_what_it_says(engine: Engine, checkout: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    limits = f"nofile={engine.most} --ulimit nproc={engine.most}"  # no more than this machine may give
    run = [command for command in commands_of(PAGE.read_text()) if not command.why_not]
    assert len(run) == 4
    for command in run:
        text = command.text.replace(HTTP, address)
        text = text.replace("nofile=65536", limits) if engine.most < 65536 else text
        done = subprocess.run(
            ["bash", "-euc", f"PATH={shlex.quote(str(checkout / 'bin'))}:$PATH\n{text}"],
            cwd=checkout,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=COMMAND_S,
        )
        assert done.returncode == 0, f"{text}\n{done.stdout}"
        for line in command.shown:
            assert is_seen(line, done.stdout), f"{text}\n{line!r} is not in:\n{done.stdout}"
