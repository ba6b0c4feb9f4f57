"""The table of errors: every reason that is given, and the same words on every way."""

import ast
from pathlib import Path

import pytest
from google.rpc import error_details_pb2

from kvtier.appliance import errors
from kvtier.appliance.core.results import Refusal

from ..docs.tables import error_table_markdown

APPLIANCE = Path(errors.__file__).parent


def reasons_in_source() -> set[str]:
    """Every string in the source that is passed as a reason."""
    found = set()
    for path in APPLIANCE.rglob("*.py"):
        if "cli" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                name = getattr(node.func, "id", getattr(node.func, "attr", ""))
                if name in ("error", "Refusal", "refuse", "_refuse"):
                    found |= {
                        argument.value
                        for argument in node.args
                        if isinstance(argument, ast.Constant)
                        and isinstance(argument.value, str)
                        and argument.value.isupper()
                        and "_" in argument.value + "_"
                    }
    return found


def test_every_reason_that_is_given_is_documented_and_the_other_way_round() -> None:
    assert reasons_in_source() == set(errors.REASONS)


def test_the_table_is_printed_whole() -> None:
    table = error_table_markdown()
    for reason, row in errors.REASONS.items():
        [line] = [line for line in table.splitlines() if line.startswith(f"| `{reason}` |")]
        assert row.code.name in line
        assert row.recovery in line


@pytest.mark.parametrize("reason", errors.REASONS)
def test_one_problem_says_the_same_on_every_way(reason: str) -> None:
    problem = errors.from_refusal(Refusal(reason, "the fix", 0.25))
    assert isinstance(problem, errors.REASONS[reason].family)
    detail = errors.to_detail(problem)
    assert (detail.reason, detail.message, detail.retry_after_ms) == (reason, "the fix", 250)
    status = errors.to_status(problem)
    assert status.code == detail.code == errors.REASONS[reason].code.value[0]
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    assert status.details[0].Unpack(info)
    assert status.details[1].Unpack(retry)
    assert (info.reason, info.domain) == (reason, "kvtier")
    assert retry.retry_delay.ToMilliseconds() == 250
