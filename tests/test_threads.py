"""Background threads make way for others, and go on where the system does not let them."""

import ctypes
import os
import platform
import struct
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtier.tiers.copiers import make_pool
from kvtier.v1.threads import NICENESS, SLICE_S, lower_thread_priority

pytestmark = pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="Linux has these policies")
_SYS_SCHED_GETATTR = {"x86_64": 315, "aarch64": 275}
_SCHED_ATTR = struct.Struct("=IIQiIQQQ")


def apart(work: Callable[[], None]) -> None:
    """Run `work` in a thread of its own, and raise what it raised."""
    problems: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as problem:
            problems.append(problem)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    for problem in problems:
        raise problem


def policy_here() -> tuple[int, int]:
    """Return policy and nice value of the calling thread."""
    thread = threading.get_native_id()
    return os.sched_getscheduler(thread), os.getpriority(os.PRIO_PROCESS, thread)


def slice_here_ns() -> int:
    """Return the slice that the calling thread has asked for; 0 where the kernel does not say."""
    number = _SYS_SCHED_GETATTR[platform.machine()]
    answer = ctypes.create_string_buffer(_SCHED_ATTR.size)
    assert ctypes.CDLL(None).syscall(number, 0, answer, _SCHED_ATTR.size, 0) == 0
    return int(_SCHED_ATTR.unpack(answer.raw)[5])


def test_a_thread_that_makes_way_waits_for_others_and_shows_its_name() -> None:
    before = policy_here()

    def work() -> None:
        lower_thread_priority("kvtier-with-a-long-name", 3)
        assert policy_here() == (os.SCHED_BATCH, min(19, before[1] + 3))
        comm = Path(f"/proc/self/task/{threading.get_native_id()}/comm").read_text()
        assert comm == "kvtier-with-a-l\n"

    apart(work)
    assert policy_here() == before


@pytest.mark.skipif(platform.machine() not in _SYS_SCHED_GETATTR, reason="a system call without a name")
def test_it_asks_for_a_slice_that_everybody_may_interrupt() -> None:
    if slice_here_ns() == 0:
        pytest.skip("kernels before 6.12 know no slices")

    def work() -> None:
        lower_thread_priority("kvtier-test")
        assert slice_here_ns() == round(SLICE_S * 1e9)

    apart(work)


def test_what_is_forbidden_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbid(*arguments: object) -> None:
        raise PermissionError("not here")

    monkeypatch.setattr(os, "setpriority", forbid)
    before = policy_here()

    def work() -> None:
        lower_thread_priority("kvtier-test")
        assert policy_here() == before

    apart(work)


@pytest.mark.parametrize("in_background", [True, False])
def test_pools_in_the_background_lower_thread_priority_and_others_do_not(in_background: bool) -> None:
    pool = make_pool(2, "kvtier-test", in_background)
    try:
        found = {future.result() for future in [pool.submit(policy_here) for _ in range(8)]}
    finally:
        pool.shutdown()
    policy, nice = policy_here()
    assert found == {(os.SCHED_BATCH, min(19, nice + NICENESS)) if in_background else (policy, nice)}
