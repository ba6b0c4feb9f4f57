"""Runtimes of versions that were not tested are refused."""

import re

import pytest

from kvtier.clients.connector.versions import SUPPORTED, check_version
from kvtier.clients.errors import PreconditionFailed


@pytest.mark.parametrize(
    ("runtime", "version"),
    [
        ("vLLM", "0.32.0"),
        ("vLLM", "0.32.7+cpu"),
        ("vLLM", "0.32.1.dev3+g123"),
        ("SGLang", "0.5.23"),
        ("LMCache", "0.5.6"),
    ],
)
def test_known_versions_are_served(runtime: str, version: str) -> None:
    check_version(runtime, version)


@pytest.mark.parametrize(
    ("runtime", "versions"),
    [
        ("vLLM", ["0.31.4", "0.33.0", "0.320.0", "0.3.2", "1.0", "dev", ""]),
        ("SGLang", ["0.5.22", "0.5.230", "0.6.0", ""]),
        ("LMCache", ["0.4.9", "0.6.0", "0.50.1", "1.0"]),
    ],
)
def test_other_versions_are_refused_by_name(runtime: str, versions: list[str]) -> None:
    for version in versions:
        words = f"{runtime} {version}, only with {SUPPORTED[runtime][0]};"
        with pytest.raises(PreconditionFailed, match=re.escape(words)) as refused:
            check_version(runtime, version)
        assert refused.value.reason == "UNSUPPORTED_RUNTIME"
