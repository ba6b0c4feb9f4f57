"""What a connector must survive, as checks that any runtime's adapter can be put through.

    for check in connector_checks(make_runtime, block_tokens=16):
        check()                      # or: pytest.mark.parametrize("check", connector_checks(...), ids=str)

The runtime under test is small: it serves prompts one after the other and compares what its adapter loaded
with what it would have computed, because only it knows its bytes. Each check has a FakeAppliance of its own.
Rejected: a base class of tests, which would bind users to one test framework.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..errors import Overloaded
from ..sync import Client

NUM_BLOCKS = 5  # of the prompts
MAX_CALLS = 12  # of a served prompt, each of which fails once


class RuntimeUnderTest(Protocol):
    """A runtime with the adapter that is checked."""

    def serve(self, tokens: Sequence[int], session: str) -> int:
        """Serve a prompt to its end; return how many tokens were not computed.

        Raises AssertionError when a loaded block is not what computing it would have given."""
        ...


MakeRuntime = Callable[[Callable[[], Client]], RuntimeUnderTest]
MakeAppliance = Callable[..., Any]  # testing.FakeAppliance
LEASES_END_S = 3600.0  # a release may be the call that fails: then the lease ends by itself


@dataclass(frozen=True, slots=True)
class ConnectorCheck:
    """One check: call it. Raises AssertionError, or whatever the adapter let out."""

    name: str
    run: Callable[["_Scene"], None]
    make_runtime: MakeRuntime
    make_appliance: MakeAppliance
    block_tokens: int

    def __call__(self) -> None:
        self.run(_Scene(self.make_runtime, self.make_appliance, self.block_tokens))

    def __str__(self) -> str:
        return self.name


class _Scene:
    def __init__(self, make_runtime: MakeRuntime, make_appliance: MakeAppliance, block_tokens: int) -> None:
        self.now = 0.0
        self.appliance = make_appliance(clock=lambda: self.now)
        self.block_tokens = block_tokens
        self._make_runtime = make_runtime
        self._make_appliance = make_appliance
        self.prompt = list(range(1, NUM_BLOCKS * block_tokens + 2))  # one more than whole blocks

    def runtime(self) -> RuntimeUnderTest:
        return self._make_runtime(self.appliance.client)

    @property
    def all_blocks(self) -> int:
        return NUM_BLOCKS * self.block_tokens


def checks_of(
    make_runtime: MakeRuntime, make_appliance: MakeAppliance, block_tokens: int
) -> list[ConnectorCheck]:
    """Return the checks of a runtime that `make_runtime(make_client)` makes, fresh each time."""
    return [
        ConnectorCheck(
            name.removeprefix("_").replace("_", " "), run, make_runtime, make_appliance, block_tokens
        )
        for name, run in _CHECKS.items()
    ]


def _a_next_turn_computes_what_is_new(scene: _Scene) -> None:
    runtime, more = scene.runtime(), list(range(9000, 9000 + 2 * scene.block_tokens))
    assert runtime.serve(scene.prompt, "anna") == 0
    assert runtime.serve(scene.prompt, "anna") == scene.all_blocks
    assert runtime.serve([*scene.prompt, *more], "anna") == scene.all_blocks
    assert runtime.serve([*scene.prompt, *more], "ben") == scene.all_blocks + 2 * scene.block_tokens
    assert runtime.serve([9999, *scene.prompt], "ben") == 0, "another beginning shares nothing"
    assert scene.runtime().serve(scene.prompt, "cleo") == scene.all_blocks, "another process finds it"


def _the_last_token_is_computed(scene: _Scene) -> None:
    runtime, whole = scene.runtime(), scene.prompt[:-1]
    runtime.serve(scene.prompt, "anna")
    assert runtime.serve(whole, "anna") == scene.all_blocks - scene.block_tokens
    assert runtime.serve(scene.prompt[: scene.block_tokens - 1], "anna") == 0, "shorter than a block"


def _without_a_daemon_all_is_computed(scene: _Scene) -> None:
    scene.appliance.unavailable = True
    runtime = scene.runtime()
    assert runtime.serve(scene.prompt, "anna") == runtime.serve(scene.prompt, "anna") == 0
    scene.appliance.unavailable = False
    scene.runtime().serve(scene.prompt, "anna")
    assert scene.runtime().serve(scene.prompt, "anna") == scene.all_blocks


def _a_daemon_that_goes_is_a_miss(scene: _Scene) -> None:
    runtime = scene.runtime()
    runtime.serve(scene.prompt, "anna")
    scene.appliance.unavailable = True
    assert runtime.serve(scene.prompt, "anna") == 0


def _a_restarted_daemon_is_filled_again(scene: _Scene) -> None:
    runtime = scene.runtime()
    runtime.serve(scene.prompt, "anna")
    scene.appliance.restart()
    assert runtime.serve(scene.prompt, "anna") == 0
    assert scene.runtime().serve(scene.prompt, "anna") == scene.all_blocks


def _any_call_may_fail(scene: _Scene) -> None:
    """Each call of a served prompt is the one that fails, once."""
    for number in range(MAX_CALLS):
        fresh = _Scene(scene._make_runtime, scene._make_appliance, scene.block_tokens)
        runtime = fresh.runtime()
        runtime.serve(scene.prompt, "anna")
        failures = fresh.appliance.server.failures
        failures.extend([None] * number + [Overloaded("no room", reason="TIER_FULL")])
        assert runtime.serve(scene.prompt, "anna") <= scene.all_blocks
        failures.clear()
        assert runtime.serve(scene.prompt, "anna") <= scene.all_blocks
        fresh.now += LEASES_END_S
        _assert_nothing_is_held(fresh.appliance)


def _what_was_evicted_is_computed(scene: _Scene) -> None:
    runtime = scene.runtime()
    runtime.serve(scene.prompt, "anna")
    scene.appliance.evict_all()
    assert runtime.serve(scene.prompt, "anna") == 0


def _nothing_is_held_when_all_is_done(scene: _Scene) -> None:
    runtime = scene.runtime()
    for session in ("anna", "ben"):
        runtime.serve(scene.prompt, session)
    _assert_nothing_is_held(scene.appliance)


def _assert_nothing_is_held(appliance: Any) -> None:
    assert appliance.check_integrity() == []
    appliance.evict_all()
    assert appliance.num_blocks == 0, f"{appliance.num_blocks} blocks are held: a lease was not released"


_CHECKS = {
    run.__name__: run
    for run in (
        _a_next_turn_computes_what_is_new,
        _the_last_token_is_computed,
        _without_a_daemon_all_is_computed,
        _a_daemon_that_goes_is_a_miss,
        _a_restarted_daemon_is_filled_again,
        _any_call_may_fail,
        _what_was_evicted_is_computed,
        _nothing_is_held_when_all_is_done,
    )
}
