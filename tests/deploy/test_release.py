"""`make dist` refuses what it should. That it makes what it should is seen when it runs with an index."""

import shutil
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("helm_python", reason="make test-helm installs it")

from deploy import release
from tests.distributions import ROOT

METADATA = """Metadata-Version: 2.4
Name: kvtier
Version: 1.0
License-Expression: Apache-2.0 AND BSD-2-Clause
License-File: LICENSE
License-File: native/LICENSE.xxHash
Description-Content-Type: text/markdown

What it is."""


def wheel(folder: Path, **files: str) -> Path:
    """Write a wheel with these files, `__` for a slash and METADATA for its metadata, and return it."""
    folder.mkdir()
    path = folder / "kvtier-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            place = {"METADATA": "kvtier-1.0.dist-info/METADATA", "RECORD": "kvtier-1.0.dist-info/RECORD"}
            archive.writestr(place.get(name, f"kvtier/{name}.py"), text)
    return path


def test_wheels_are_compared_file_by_file(tmp_path: Path) -> None:
    whole = wheel(tmp_path / "a", one="1", two="2", RECORD="a")
    release.check_same(whole, wheel(tmp_path / "b", two="2", one="1", RECORD="b"))
    for folder, files in (("c", {"one": "1"}), ("d", {"one": "1", "two": "3"})):
        with pytest.raises(release.CannotRelease, match=r"differs from .* \['kvtier/two.py'\]"):
            release.check_same(whole, wheel(tmp_path / folder, **files))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("License-Expression: Apache-2.0 AND BSD-2-Clause\n", "says of itself"),
        ("License-File: LICENSE\n", "says of itself"),
        ("License-File: native/LICENSE.xxHash\n", "says of itself"),
        ("Description-Content-Type: text/markdown\n", "says of itself"),
        ("Version: 1.0\n", "version"),
    ],
)
def test_metadata_without_a_line_is_refused(tmp_path: Path, line: str, reason: str) -> None:
    release.check_metadata(wheel(tmp_path / "whole", METADATA=METADATA))
    with pytest.raises(release.CannotRelease, match=reason):
        release.check_metadata(wheel(tmp_path / "less", METADATA=METADATA.replace(line, "")))


def test_a_chart_package_without_its_schema_is_refused(tmp_path: Path) -> None:
    chart = tmp_path / "kvtier"
    shutil.copytree(ROOT / "helm" / "kvtier", chart)
    assert release.build_chart(chart, tmp_path).name == "kvtier-0.1.0.tgz"
    (chart / "values.schema.json").unlink()
    with pytest.raises(release.CannotRelease, match="has no schema"):
        release.build_chart(chart, tmp_path)


def test_what_the_image_lacks_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "make").symlink_to("/usr/bin/make")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "buildah" in release.missing_for_image()
