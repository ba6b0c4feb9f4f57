"""Errors of clients: a gRPC status without a detail of ours, and the documented reasons."""

import ast
from pathlib import Path

import pytest

from kvtier.appliance.errors import REASONS as DAEMON
from kvtier.clients import errors
from kvtier.clients.errors import CLIENT_REASONS, KvtierError, ServerBug, Unavailable, from_status
from kvtier.v1.unreachable import REASONS as UNREACHABLE

CLIENTS = Path(errors.__file__).parent
API_PAGE = Path(__file__).resolve().parents[2] / "docs" / "api.md"
FAMILIES = {"NotFound", "InvalidRequest", *errors.__all__}


def reasons_in_source() -> set[str]:
    """Return every constant that the clients' source passes as `reason` of an error."""
    return {
        constant.value
        for path in CLIENTS.rglob("*.py")
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") in FAMILIES
        for keyword in call.keywords
        if keyword.arg == "reason"
        for constant in ast.walk(keyword.value)
        if isinstance(constant, ast.Constant) and isinstance(constant.value, str)
    }


def test_every_reason_of_a_client_is_documented_once() -> None:
    assert reasons_in_source() - set(DAEMON) - set(UNREACHABLE) == set(CLIENT_REASONS)
    page = API_PAGE.read_text()
    for reason in CLIENT_REASONS:
        assert page.count(f"| `{reason}` |") == 1


@pytest.mark.parametrize(
    ("code", "family", "reason"),
    [
        (1, Unavailable, "CONNECTION_LOST"),  # a call that the end of a drain cut off: no bug, a miss
        (14, Unavailable, "CONNECTION_LOST"),
        (4, Unavailable, "NO_ANSWER"),
        (13, ServerBug, "UNKNOWN"),
    ],
)
def test_a_bare_status_is_told_apart(code: int, family: type[KvtierError], reason: str) -> None:
    problem = from_status(code, "words", {})
    assert (type(problem), problem.reason) == (family, reason)
