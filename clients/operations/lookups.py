"""Lookup: read from the residence table, which the daemon keeps in shared memory; asked for where needed.

    read     tiers of the longest stored prefix, and what loading and computing it cost      no call
    asked    without shared memory; and of a block that is not in the table, if more may be known of it

Both give the same answer. Neither promises anything: what a lookup tells may leave before it is read, and
what an acquire reported stays until its release.
"""

from typing import Any

from ...v1 import kvcache_pb2, local_pb2
from ...v1.advice import advise
from ...v1.residence import RESIDENCE_EXTENT
from ...v1.shm import HASH_BYTES
from ..errors import KvtierError, Overloaded, Unavailable
from ..memory.extents import map_memory
from ..memory.residence import ResidenceReader
from ..values.namespace import Namespace
from ..values.types import Lookup
from .answers import num_blocks_of, tiers_of
from .base import Operations, only_answer
from .effects import Attachment, Operation, Send


def lookup(operations: Operations, namespace: Namespace, hashes: Any) -> Operation[Lookup]:
    """Return how much of a chain is stored; see Client.lookup."""
    attachment, namespace_id = yield from operations.begin(namespace)
    packed = operations.chain(attachment, hashes)
    if not packed:
        return Lookup(0, (), 0.0)
    if attachment.has_residence and (attachment.residence is None or attachment.residence.is_retired):
        yield from _map_residence(operations, attachment)
    found = look_up_here(attachment, namespace, packed)
    if found is not None:
        return found
    request = kvcache_pb2.LookupRequest(namespace_id=namespace_id, prefix_hashes=packed)
    response = yield from operations.call(attachment, "Lookup", request)
    num_blocks = num_blocks_of(response, len(packed) // HASH_BYTES)
    return Lookup(
        num_blocks,
        tiers_of(response.tiers, attachment.tiers),
        response.load_s,
        response.recompute_s,
        min(response.num_worth_loading, num_blocks),
        response.reason,
        min(response.num_fetchable, len(packed) // HASH_BYTES - num_blocks),
        response.fetch_s,
        response.search_s,
    )


def look_up_here(attachment: Attachment, namespace: Namespace, packed: bytes) -> Lookup | None:
    """Answer a lookup from shared memory alone, without lock or generator; None where it has to be asked."""
    reader = attachment.residence
    if reader is None or not packed or namespace.__class__ is not Namespace:
        return None  # what is wrong is said where there is time
    namespace_id = attachment.namespace_ids.get(namespace.digest)
    if namespace_id is None or len(packed) > attachment.info.max_blocks_per_request * HASH_BYTES:
        return None
    codes, is_certain = reader.find(packed, namespace_id)
    is_whole = len(codes) * HASH_BYTES == len(packed)
    is_cold = reader.slowest in codes
    if not is_certain and (is_cold or not is_whole or reader.is_retired):
        return None
    speed = reader.speed(namespace, namespace_id)
    if speed is None or attachment.is_lost():  # the table of a daemon that is no more is out of date
        return None
    tiers = tiers_of(codes, attachment.tiers)
    if not is_cold:
        return Lookup(len(tiers), tiers, 0.0, speed.seconds(0, len(tiers)), len(tiers))
    slowest = attachment.tiers.tier(reader.slowest)
    edge = reader.edge(slowest) if slowest is not None else None
    if edge is None:
        return None
    prices = advise(speed, edge, codes.translate(reader.is_slow))
    return Lookup(len(tiers), tiers, prices.load_s, prices.recompute_s, prices.num_blocks, prices.reason)


def _map_residence(operations: Operations, attachment: Attachment) -> Operation[None]:
    """Map the table of this client's domain; take note where there is none."""
    attachment.residence, attachment.has_residence = None, attachment.reader is not None
    if not attachment.has_residence:  # no shared memory, or a fake's
        return
    request = local_pb2.MapExtentsRequest(extents=[RESIDENCE_EXTENT])
    try:
        ticket = yield Send("MapExtents", request, operations.deadline(None))
        answer = yield from only_answer(ticket)
    except KvtierError as problem:
        if isinstance(problem, Unavailable):
            raise
        attachment.has_residence = False  # of an older daemon, or one without memory for it
        return
    try:
        memory = [map_memory(one) for one in answer.memory]
        attachment.residence = ResidenceReader(memory[0], attachment.info.epoch)
    except (IndexError, ValueError, Overloaded):  # no table, or no room in this process for one
        attachment.has_residence = False
