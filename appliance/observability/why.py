"""Why: what the decision log says about where a block is, or the blocks of a session are.

The log is the story: bounded, newest kept. So an answer may say less than happened, never something else. A
session is answered for by the blocks of the chain it used last (telemetry.py); which of them are gone, the
catalog no longer knows.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ...tiers.block import HASH_BYTES
from ...v1 import admin_pb2 as pb
from ..core.catalog.catalog import NO_ROW
from ..core.catalog.story import Decision
from ..core.planner import Planner
from .telemetry import Telemetry

VERBS = ("evicted_", "condemned_")
GONE = "gone"
STORE = "store"  # in no tier, but known to be in the object store
MAX_EXITS = 100
MAX_LINES = 1 << 20  # all that are remembered


@dataclass(frozen=True, slots=True)
class Explanation:
    """Where the blocks are, and which left a tier and why, newest first."""

    num_blocks: Counter[str]
    exits: Sequence[Decision]
    prefix_hash: bytes = b""

    def message(self, started_at: float, now: float) -> pb.ExplainResponse:
        """Return it for the wire; times count from the start of the daemon."""
        answer = pb.ExplainResponse(
            num_blocks=self.num_blocks, prefix_hash=self.prefix_hash, uptime_s=now - started_at
        )
        for line, num_blocks in self.exits:
            price, next_price, next_block = line.verdict
            assert isinstance(line.subject, bytes)
            exit_ = answer.exits.add(
                at_s=line.at - started_at,
                tier=line.what.partition("_")[2],
                what=line.what,
                why=line.why.partition("; price")[0],
                num_blocks=num_blocks,
                prefix_hash=line.subject,
                next_hash=next_block,
            )
            if not math.isnan(price):
                exit_.price = price
            if not math.isnan(next_price):
                exit_.next_price = next_price
        return answer


class Explainer:
    """Answers from the planner's story."""

    def __init__(self, planner: Planner, telemetry: Telemetry) -> None:
        self._planner = planner
        self._telemetry = telemetry
        tiers = planner.core.ladder.tiers
        self._exit_words = frozenset(f"{verb}{tier.label}" for verb in VERBS for tier in tiers)

    def block(self, namespace_id: int, prefix: bytes) -> Explanation | None:
        """Return what is remembered of a block named by its hash or a unique beginning; None: nothing is."""
        name = self._name_of(namespace_id, prefix)
        where = self._where(namespace_id, [name])
        exits = self._exits(namespace_id, {name})
        return Explanation(where, exits, name) if exits or GONE not in where else None

    def session(self, session_id: str) -> Explanation | None:
        """Return what became of the chain that a session used last; None: it is not known."""
        namespace_id, names = self._telemetry.chain_of(session_id)
        if not names:
            return None
        return Explanation(self._where(namespace_id, names), self._exits(namespace_id, set(names)))

    def _exits(self, namespace_id: int, names: set[bytes]) -> list[Decision]:
        return self._planner.story.decisions(self._exit_words, MAX_EXITS, MAX_LINES, names, namespace_id)

    def _where(self, namespace_id: int, names: Sequence[bytes]) -> Counter[str]:
        catalog = self._planner.catalog
        known = namespace_id in catalog.namespaces
        rows = [catalog.find(namespace_id, name) if known else NO_ROW for name in names]
        tiers = [catalog.tier_of(row) if row != NO_ROW else None for row in rows]
        stored = self._stored(namespace_id, names) if known and None in tiers else [False] * len(names)
        return Counter(
            tier.label if tier is not None else STORE if is_stored else GONE
            for tier, is_stored in zip(tiers, stored, strict=True)
        )

    def _stored(self, namespace_id: int, names: Sequence[bytes]) -> list[bool]:
        """Whether the object store is known to have each block of a chain; a bundle is named by its last one.
        Of a single block only that is known: `names` may begin anywhere."""
        index = self._planner.source_index
        size = index.num_blocks(self._planner.catalog.namespaces[namespace_id]) if len(names) > 1 else 1
        bundles = [index.is_stored(namespace_id, name) for name in names[size - 1 :: size]]
        rest = [False] * (len(names) - size * len(bundles))
        return [is_stored for is_stored in bundles for _ in range(size)] + rest

    def _name_of(self, namespace_id: int, prefix: bytes) -> bytes:
        """Return the whole hash: the catalog's, or that of the only block remembered that begins so."""
        found = self._planner.inspection.block(namespace_id, prefix)
        if found is not None:
            return bytes.fromhex(found["prefix_hash"])
        if len(prefix) < HASH_BYTES:
            names = self._planner.story.starting_with(prefix, namespace_id)
            if len(names) == 1:
                return names.pop()
        return prefix.ljust(HASH_BYTES, b"\0")
