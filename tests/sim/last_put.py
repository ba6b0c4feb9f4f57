"""The last put: when everybody has gone home, whoever comes finds room.

Nothing is held, pinned or decoded on any more, so whatever stands in the way of one new block stands there
for ever: a cold store that is full of what must not leave it, and memory that waits for it. Tried a few
times, because what makes room may take longer than a put waits.
"""

from typing import TYPE_CHECKING, Any

from kvtier.appliance.core import events as ev
from kvtier.appliance.core.results import PutOutcome, Refusal
from kvtier.tiers.block import NamespaceIdentity
from kvtier.tiers.memory.slots import SlotPool

from .config import Config
from .ladder import DRAM
from .putting import Put
from .requests import Chain, Client
from .world import Violation

if TYPE_CHECKING:
    from .run import Run

NUM_TRIES = 12
ANSWERED = (PutOutcome.STORED, PutOutcome.DECLINED)  # a policy may say that nobody is to come in


class LastPut(Put):
    """A put of one block, whose answer is kept."""

    outcome: int = 0

    def _stored(self, result: Any) -> None:
        super()._stored(result)
        if not isinstance(result, Refusal):
            self.outcome = result.outcomes[0]


def check_room(run: "Run") -> None:
    """Put a new block into each namespace for which memory is large enough. Raises Violation."""
    if not is_due(run.config):
        return
    for index, identity in enumerate(run.crowd.identities):
        if _fits(run, identity) and not _finds_room(run, index, identity):
            raise Violation("liveness", f"nobody can put anything into namespace {index} any more")


def is_due(config: Config) -> bool:
    """Whether a put must find room: not where domains compete for extents, have quotas or shares, nor with so
    few segments that one, of two blocks at most, is all that spills can use: what it took is reclaimed for
    the next one before a put comes to its turn."""
    options = config.options
    is_alone = len(set(config.domain_of_namespace)) == 1 and not options.quotas and not options.num_tenants
    num_usable = config.num_segments - options.min_free_segments
    return is_alone and (not config.num_segments or num_usable > 2)


def _fits(run: "Run", identity: NamespaceIdentity) -> bool:
    room = run.daemon.rooms[DRAM]
    assert isinstance(room, SlotPool)
    empty, geometry = SlotPool(room.num_extents, room.extent_bytes), identity.geometry
    return all(empty.reserve(0, geometry.fragment_bytes[g]) is not None for g in range(geometry.num_groups))


def _finds_room(run: "Run", index: int, identity: NamespaceIdentity) -> bool:
    daemon, crowd = run.daemon, run.crowd
    client = Client(2_000_000 + index, identity.domain, True)
    daemon.stagings[client.number] = client.staging
    daemon.local.add(client.number)
    crowd.clients.append(client)
    daemon.step(ev.ClientOpened(client.number, "last", True, identity.domain))
    is_found = False
    for attempt in range(NUM_TRIES):
        daemon.planner.reclaim._not_before = 0.0  # the simulator stops what would go on for ever; run.py
        name = bytes([index, attempt]) * 16
        put = LastPut(crowd, client, Chain(crowd.namespace_ids[index], identity, [name]), b"")
        put.session_id, put.deadline_at, put.retention = "", float("inf"), []
        put.start(one_step=True)
        run.settle()
        if put.outcome in ANSWERED:
            is_found = True
            break
    crowd.die(client)
    run.settle()
    return is_found
