"""What one tenant stored does not exist for another one: not by hits, not by what the planner does.

The clock is measured by `python -m bench.timing`; here is why it has nothing to tell. Whether another tenant
has a block is in no column, table or index that a request of this tenant reads, so the planner answers with
the very same instructions.
"""

from typing import Any

import pytest

from kvtier.appliance.core import events as ev
from kvtier.appliance.core.catalog.catalog import Catalog
from kvtier.appliance.core.catalog.policy_facts import PolicyFacts
from kvtier.appliance.core.instructions import Copy, Instruction, Reply
from kvtier.appliance.core.results import PutOutcome
from kvtier.tiers.block import Geometry, NamespaceIdentity, Tier

from ..appliance.core.requests.test_quotas import ACME, BLOCK_BYTES, BOLT, STORED, Shared, names


class Watched(Shared):
    """Remembers what the planner said, without what differs in any two calls: numbers and places."""

    said: list[str]

    def do(self, event: ev.Event) -> None:
        self.said = getattr(self, "said", [])
        planner = self.planner
        handle = planner.handle

        def watched(what: ev.Event, now: float) -> list[Instruction]:
            instructions = handle(what, now)
            self.said += [shape(instruction) for instruction in instructions]
            return instructions

        planner.handle = watched  # type: ignore[method-assign, assignment]
        try:
            super().do(event)
        finally:
            planner.handle = handle  # type: ignore[method-assign]


def shape(instruction: Instruction) -> str:
    kind = type(instruction).__name__
    if isinstance(instruction, Reply):
        result = instruction.result
        outcomes = getattr(result, "outcomes", b"")
        return f"{kind} {type(result).__name__} {getattr(result, 'num_blocks', '')} {bytes(outcomes).hex()}"
    if isinstance(instruction, Copy):
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


def what_policies_hear(shared: Shared, client: int, name: int, count: int) -> list[bytes]:
    """Let a client put a chain of acme's names; return what policies were told they are called."""
    heard: list[bytes] = []
    tell = shared.planner.core.facts.names

    def told(namespace_id: int, prefix_hashes: Any) -> Any:
        found = tell(namespace_id, prefix_hashes)
        heard.extend(found)
        return found

    shared.planner.core.facts.names = told  # type: ignore[method-assign]
    space, chain = shared.namespace[client], names(ACME, name, count)
    spans = [(number * BLOCK_BYTES, BLOCK_BYTES) for number in range(count)]
    shared.ask(
        lambda call: ev.CommitRequested(
            call, client, "", 0, spans, ev.ReserveRequested(call, client, "", space, b"", chain, "")
        )
    )
    shared.planner.core.facts.names = tell  # type: ignore[method-assign]
    return heard


@pytest.mark.parametrize("policy", ["urgency", "s3fifo", "arc"])
def test_a_policy_that_remembers_names_cannot_tell_one_tenants_from_anothers(policy: str) -> None:
    """Blocks of acme's that left are remembered by name. When bolt puts the same prompt, no policy may take
    that for a return."""
    shared = Shared({}, policy=policy)
    facts, catalog = shared.planner.core.facts, shared.planner.catalog
    of_acme = set(what_policies_hear(shared, ACME, 1, 2))
    of_acme |= {facts.prefix_hash[row] for row in catalog.namespaces[shared.namespace[ACME]].rows.values()}
    assert len(of_acme) == 2, "what comes and what is there has one name"
    shared.do(ev.EvictRequested(0, Tier.DRAM, 0))
    assert lookup(shared, ACME, ACME, 1) == 0
    of_bolt = set(what_policies_hear(shared, BOLT, 1, 2))
    of_bolt |= {facts.prefix_hash[row] for row in catalog.namespaces[shared.namespace[BOLT]].rows.values()}
    assert len(of_bolt) == 2
    assert not of_acme & of_bolt
    assert not (of_acme | of_bolt) & set(names(ACME, 1, 2)), "a runtime cannot choose what policies hear"


def test_names_of_the_common_domain_are_as_the_runtime_says() -> None:
    catalog = Catalog()
    facts = PolicyFacts(catalog, b"secret")
    geometry = Geometry(1, 1, 16, 16, "float16")
    common = catalog.add_namespace(NamespaceIdentity(b"m" * 16, geometry), 0, 7)
    assert facts.prefix_hash is catalog.prefix_hash
    assert list(facts.names(common.id, names(ACME, 1, 2))) == names(ACME, 1, 2)
    own = catalog.add_namespace(NamespaceIdentity(b"m" * 16, geometry, domain="tenant:acme"), 1, 3)
    assert facts.prefix_hash is not catalog.prefix_hash
    assert list(facts.names(common.id, names(ACME, 1, 2))) == names(ACME, 1, 2)
    masked = facts.names(own.id, names(ACME, 1, 2))
    assert [len(name) for name in masked] == [32, 32]
    other_life = PolicyFacts(catalog, b"another")
    assert not set(masked) & set(other_life.names(own.id, names(ACME, 1, 2)))
