"""The audit of dependencies can fail."""

import pytest

from tests import audit


def test_our_dependencies_pass() -> None:
    assert audit.problems() == []
    assert audit.requirement_files()


@pytest.mark.parametrize(
    "line", ["numpy", "numpy>=1", "numpy~=1.0", "numpy==1.*", "git+https://x/y", "-r other.txt", "a==1,<2"]
)
def test_what_names_no_version_is_found(line: str) -> None:
    assert list(audit.unpinned(f"# ours\ngrpcio==1.85.1\n{line}\n")) == [line]


def test_pins_are_read_whatever_their_spelling() -> None:
    assert audit.pins("PyYAML==6.0.3\na_b[c]==1  # why\nx==2 ; python_version < '4'") == {
        "pyyaml": "6.0.3",
        "a-b": "1",
        "x": "2",
    }


@pytest.mark.parametrize(
    ("licence", "is_fine"),
    [
        ("mit", True),
        ("apache-2.0", True),
        ("bsd-3-clause and mit", True),
        ("apache-2.0 or bsd-3-clause", True),
        ("mit or gpl-2.0-only", True),
        ("gpl-3.0-only", False),
        ("agpl-3.0", False),
        ("proprietary", False),
        ("", False),
    ],
)
def test_licences(licence: str, is_fine: bool) -> None:
    assert (audit.wrong_licence("package", licence) == "") is is_fine
