"""What one tenant stored does not exist for another one: not by hits, not by what the planner does.

The clock is measured by `python -m bench.timing`; here is why it has nothing to tell. Whether another tenant
has a block is in no column, table or index that a request of this tenant reads, so the planner answers with
the very same instructions.
"""

from typing import Any

import pytest

from kvtier.appliance.core import events as ev
from kvtier.appliance.core.results import PutOutcome
from kvtier.tiers.block import Tier

from ..appliance.core.test_quotas import ACME, BLOCK_BYTES, BOLT, STORED, Shared, names


class Watched(Shared):
    """Remembers what the planner said, without what differs in any two calls: numbers and places."""

    said: list[str]

    def do(self, event: ev.Event) -> None:
        self.said = getattr(self, "said", [])
        planner = self.planner
        handle = planner.handle

        def watched(what: ev.Event, now: float) -> list[ev.Instruction]:
            instructions = handle(what, now)
            self.said += [shape(instruction) for instruction in instructions]
            return instructions

        planner.handle = watched  # type: ignore[method-assign, assignment]
        try:
            super().do(event)
        finally:
            planner.handle = handle  # type: ignore[method-assign]


def shape(instruction: ev.Instruction) -> str:
    kind = type(instruction).__name__
    if isinstance(instruction, ev.Reply):
        result = instruction.result
        outcomes = getattr(result, "outcomes", b"")
        return f"{kind} {type(result).__name__} {getattr(result, 'num_blocks', '')} {bytes(outcomes).hex()}"
    if isinstance(instruction, ev.Copy):
        return f"{kind} {len(instruction.items)}"
    return kind


def lookup(shared: Shared, client: int, namespace: int, name: int) -> Any:
    found = shared.planner.lookup(shared.namespace[namespace], names(ACME, name, 2))
    return getattr(found, "num_blocks", None)


def do_as_bolt(shared: Watched, what: str, name: int) -> list[str]:
    """Let bolt make a call about the names of acme's chain; return what the planner said."""
    shared.said = []
    chain = names(ACME, name, 2)
    space = shared.namespace[BOLT]
    if what == "put":
        spans = [(0, BLOCK_BYTES), (BLOCK_BYTES, BLOCK_BYTES)]
        shared.ask(
            lambda call: ev.CommitRequested(
                call, BOLT, "", 0, spans, ev.ReserveRequested(call, BOLT, "", space, b"", chain, "")
            )
        )
    elif what == "acquire":
        shared.ask(lambda call: ev.AcquireRequested(call, BOLT, "", space, chain, load_anyway=True))
    elif what == "pin":
        shared.ask(lambda call: ev.PinRequested(call, BOLT, "", space, chain, Tier.DRAM, 10.0))
    elif what == "prefetch":
        shared.ask(lambda call: ev.PrefetchRequested(call, BOLT, space, chain, Tier.DRAM, float("inf")))
    else:
        shared.do(ev.Touched(BOLT, space, chain, ""))
    return shared.said


@pytest.mark.parametrize("what", ["put", "acquire", "pin", "prefetch", "touch"])
@pytest.mark.parametrize("where", ["dram", "nvme"])
def test_the_planner_does_the_same_whether_another_tenant_has_it_or_nobody(what: str, where: str) -> None:
    said = {}
    for owner in ("nobody", "acme", "bolt"):
        shared = Watched({}, has_nvme=True)
        for client, filler in ((ACME, 90), (BOLT, 91)):  # the same room is taken in every case
            shared.put(client, filler, 1)
        if owner == "acme":
            assert shared.put(ACME, 1, 2) == STORED * 2
            if where == "nvme":
                shared.do(ev.EvictRequested(0, Tier.DRAM, 0))
        elif owner == "bolt":
            do_as_bolt(shared, "put", 1)
        said[owner] = do_as_bolt(shared, what, 1)
    assert said["acme"] == said["nobody"]
    if what in ("put", "acquire", "pin"):
        assert said["bolt"] != said["nobody"], "one's own makes a difference: the comparison can fail"


def test_nothing_of_another_tenant_is_found_nor_deduplicated_in_any_tier() -> None:
    shared = Shared({}, has_nvme=True)
    chain = names(ACME, 1, 2)
    assert shared.put(ACME, 1, 2) == STORED * 2
    assert [lookup(shared, client, client, 1) for client in (ACME, BOLT)] == [2, 0]
    digests = {namespace.identity.digest for namespace in shared.planner.catalog.namespaces.values()}
    assert len(digests) == 2, "one model, one geometry, two tenants: two namespaces"
    spans = [(0, BLOCK_BYTES), (BLOCK_BYTES, BLOCK_BYTES)]
    for client, outcome in ((BOLT, PutOutcome.STORED), (ACME, PutOutcome.DEDUPLICATED)):
        space = shared.namespace[client]
        result: Any = shared.ask(
            lambda call, client=client, space=space: ev.CommitRequested(
                call, client, "", 0, spans, ev.ReserveRequested(call, client, "", space, b"", chain, "")
            )
        )
        assert bytes(result.outcomes) == bytes([outcome]) * 2
    for client in (ACME, BOLT):  # each other's namespace by its number, which is easily guessed
        other = BOLT if client == ACME else ACME
        result = shared.ask(
            lambda call, client=client, other=other: ev.AcquireRequested(
                call, client, "", shared.namespace[other], chain
            )
        )
        assert result.reason == "UNKNOWN_NAMESPACE"
