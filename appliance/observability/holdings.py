"""Holdings: the sessions active last, what they hold and where.

A session may hold thousands of blocks and there may be thousands of sessions, so only the ones active last
are looked at, in vectors, and at most MAX_BLOCKS blocks in all.
"""

from collections import Counter
from itertools import islice
from typing import Any

import numpy as np

from ...tiers.block import Urgency
from ..core.catalog.catalog import Catalog
from ..core.catalog.runs import column
from ..core.planner import Planner
from ..core.requests.sessions import SessionEntry
from .census import namespace_sizes

MAX_SESSIONS = 40
MAX_BLOCKS = 200_000


def by_urgency(planner: Planner) -> dict[str, int]:
    """Return how many sessions there are of each urgency."""
    counts = Counter(session.urgency for session in planner.sessions)
    return {urgency.name.lower(): counts[urgency] for urgency in Urgency}


def latest(planner: Planner) -> list[tuple[SessionEntry, dict[str, Any]]]:
    """Return the sessions active last, and where their blocks are."""
    found, num_left = [], MAX_BLOCKS
    for session in islice(planner.sessions.by_activity(), MAX_SESSIONS):
        if len(session.blocks) > num_left:
            break
        num_left -= len(session.blocks)
        found.append((session, where(planner.catalog, session)))
    return found


def where(catalog: Catalog, session: SessionEntry) -> dict[str, Any]:
    """Return the blocks of a session by the fastest tier that has all of a block, and their bytes.

    `gone` are those that were forgotten since.
    """
    handles = np.fromiter(session.blocks, np.int64, len(session.blocks))
    rows = (handles & 0xFFFFFFFF).astype(np.intp)
    rows = rows[column(catalog.serial)[rows] == handles >> 32] if len(rows) else rows
    numbers, groups, sizes = namespace_sizes(catalog)
    ids = np.searchsorted(numbers, column(catalog.namespace_id)[rows]) if len(rows) else rows
    is_open = np.ones(len(rows), bool)
    blocks, num_bytes = {}, {}
    for tier in catalog.ladder.tiers:
        is_here = (
            is_open & (column(catalog.num_resident[tier])[rows] == groups[ids]) if len(rows) else is_open
        )
        blocks[tier.label], num_bytes[tier.label] = int(is_here.sum()), int(sizes[ids[is_here]].sum())
        is_open &= ~is_here
    blocks["gone"] = len(session.blocks) - sum(blocks.values())
    return {"blocks": blocks, "bytes": num_bytes}
