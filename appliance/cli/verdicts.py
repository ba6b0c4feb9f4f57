"""One line of the doctor's report: a verdict, what is, and what to do about it."""

from enum import Enum
from typing import NamedTuple


class Verdict(Enum):
    """How a check ended."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


class Check(NamedTuple):
    """One line of the doctor's report."""

    name: str
    verdict: Verdict
    detail: str
    fix: str = ""


def ok(name: str, detail: str) -> Check:
    """Return a check that found nothing wrong."""
    return Check(name, Verdict.OK, detail)


def warn(name: str, detail: str, fix: str) -> Check:
    """Return a check that found something slower or riskier than need be."""
    return Check(name, Verdict.WARN, detail, fix)


def fail(name: str, detail: str, fix: str) -> Check:
    """Return a check that found what stops the daemon."""
    return Check(name, Verdict.FAIL, detail, fix)
