"""The container image, as far as it can be checked where nothing builds one: what it is made from, and the
steps that need no network."""

import fnmatch
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.audit import normal, pins
from tests.distributions import tracked

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "deploy" / "docker" / "Dockerfile"
EXTRAS = ("server", "cli", "codecs", "encryption", "objects", "events", "otel", "redis")


def instructions() -> list[tuple[str, str]]:
    """Return (word, rest) of every instruction, lines joined."""
    text = re.sub(r"(?m)^#.*\n", "", DOCKERFILE.read_text()).replace("\\\n", " ")
    return [(line.split()[0], " ".join(line.split()[1:])) for line in text.splitlines() if line.strip()]


def is_in_context(name: str) -> bool:
    """Whether .dockerignore lets a path through: the last line that fits decides."""
    is_ignored = False
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        pattern = line.removeprefix("!").removeprefix("**/")
        parts = [name, *(str(folder) for folder in Path(name).parents), Path(name).name]
        if any(fnmatch.fnmatchcase(part, pattern) for part in parts):
            is_ignored = not line.startswith("!")
    return not is_ignored


def copied() -> list[str]:
    """Return what the build stage copies from the context."""
    lines = [rest.split() for word, rest in instructions() if word == "COPY" and "--from" not in rest]
    return [source for line in lines for source in line[:-1]]


def test_bases_are_pinned_and_nobody_is_root() -> None:
    found = instructions()
    [base] = [rest for word, rest in found if word == "ARG" and rest.startswith("PYTHON_IMAGE=")]
    assert re.search(r":3\.\d+\.\d+-slim-\w+@sha256:[0-9a-f]{64}$", base)
    assert [rest.split()[0] for word, rest in found if word == "FROM"] == ["${PYTHON_IMAGE}"] * 2
    [user] = [rest for word, rest in found if word == "USER"]
    assert re.fullmatch(r"[1-9]\d+:[1-9]\d+", user), "numbers: Kubernetes cannot look up names"
    assert found.index(("USER", user)) > max(n for n, (word, _) in enumerate(found) if word == "RUN")


def test_everything_in_the_image_is_pinned_and_nothing_is_missing() -> None:
    image, everything = (
        pins((ROOT / name).read_text()) for name in ("requirements-image.txt", "requirements.txt")
    )
    assert {name: v for name, v in image.items() if name in everything and v != everything[name]} == {}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    to_see = [
        *project["dependencies"],
        *(r for extra in EXTRAS for r in project["optional-dependencies"][extra]),
    ]
    seen: set[str] = set()
    while to_see:
        wanted = Requirement(to_see.pop())
        name = normal(wanted.name)
        if name in seen or (wanted.marker is not None and not wanted.marker.evaluate({"extra": ""})):
            continue
        seen.add(name)
        assert name in image, f"{wanted} is not in requirements-image.txt"
        assert wanted.specifier.contains(image[name]), f"{wanted}: {image[name]} is in requirements-image.txt"
        try:
            to_see += metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue  # the exporter: not installed here
    assert set(image) - seen <= {
        *("requests", "urllib3", "certifi", "charset-normalizer", "idna"),  # the exporter's
        *("opentelemetry-exporter-otlp-proto-common", "opentelemetry-exporter-otlp-common"),
        *("opentelemetry-exporter-http-transport", "opentelemetry-proto"),
    }


def test_the_context_has_what_is_copied_and_nothing_else() -> None:
    names = tracked()
    for source in copied():
        inside = [name for name in names if name == source or name.startswith(f"{source}/")]
        assert inside, f"{source} is not there"
        assert all(is_in_context(name) for name in inside), source
    for other in (
        "tests/conftest.py",
        ".git/config",
        "shared/x",
        ".venv/bin/python",
        "appliance/__pycache__/a.pyc",
    ):
        assert not is_in_context(other)


def test_the_package_is_built_from_the_context_alone(tmp_path: Path) -> None:
    context = tmp_path / "context"
    for name in tracked():
        if is_in_context(name) and any(name == s or name.startswith(f"{s}/") for s in copied()):
            target = context / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target, follow_symlinks=False)
    [step] = [rest for word, rest in instructions() if word == "RUN" and " pip wheel " in rest]
    options = step.split(" wheel ")[1].split("&&")[0].replace("/wheels", str(tmp_path / "wheels")).split()
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet", *options]
    built = subprocess.run(command, cwd=context, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    [wheel] = (tmp_path / "wheels").glob("*.whl")
    modules = set(zipfile.ZipFile(wheel).namelist())
    folders = ("appliance/", "clients/", "policies/", "sources/", "tiers/")
    wanted = {f"kvtier/{name}" for name in tracked() if name.startswith(folders)}
    assert wanted <= modules
    assert "kvtier/appliance/observability/page/index.html" in modules


def test_hadolint_finds_nothing() -> None:
    hadolint = shutil.which("hadolint", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if hadolint is None:
        pytest.skip("make test-helm installs it")
    done = subprocess.run([hadolint, str(DOCKERFILE)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
