"""Mutants of the waiting rule: what an acquire that expects blocks must not do."""

from typing import Any

from kvtier.appliance.core.requests import acquire_job, expectations

Patch = tuple[Any, str, Any]


def waits_for_ever() -> list[Patch]:
    """What is expected is awaited past every bound."""
    cls = expectations.Expectations
    return [(cls, "expire", lambda self, now: None), (cls, "next_deadline", lambda self: None)]


def waits_for_a_host_that_is_gone() -> list[Patch]:
    """The end of what a host tells is not noticed."""
    told = expectations.Expectations.told

    def deaf(self: Any, event: Any) -> None:
        event.is_over = False
        told(self, event)

    return [(expectations.Expectations, "told", deaf)]


def promises_what_did_not_come() -> list[Patch]:
    """An acquire that waits no longer says that all has come."""
    shorten = acquire_job.AcquireJob.expect_no_more

    def boasting(self: Any) -> None:
        limit = self._limit
        shorten(self)
        self._limit = limit
        self._next = (limit, 0)

    return [(acquire_job.AcquireJob, "expect_no_more", boasting)]


EXPECTED_MUTANTS = (waits_for_ever, waits_for_a_host_that_is_gone, promises_what_did_not_come)
