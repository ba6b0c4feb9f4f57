"""The result of a check: a verdict, what was found, what to do about it, and the setting it is about."""

from enum import Enum
from typing import NamedTuple


class CheckVerdict(Enum):
    """How a check ended."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


class Check(NamedTuple):
    """One finding."""

    name: str
    verdict: CheckVerdict
    detail: str
    fix: str = ""
    setting: str = ""  # dotted key of the setting it is about, where there is one

    @property
    def advice(self) -> str:
        """Return what was found and the fix, in one line."""
        return "; ".join(part for part in (self.detail, self.fix) if part)

    def __str__(self) -> str:
        return f"{self.setting or self.name}: {self.advice}"


def ok(name: str, detail: str) -> Check:
    """Return a check that found nothing wrong."""
    return Check(name, CheckVerdict.OK, detail)


def warn(name: str, detail: str, fix: str, setting: str = "") -> Check:
    """Return a check that found something slower or riskier than need be."""
    return Check(name, CheckVerdict.WARN, detail, fix, setting)


def fail(name: str, detail: str, fix: str, setting: str = "") -> Check:
    """Return a check that found what stops the daemon."""
    return Check(name, CheckVerdict.FAIL, detail, fix, setting)
