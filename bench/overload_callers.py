"""Callers of bench.overload, in a process of their own: prints what they got as JSON.

    python -m bench.overload_callers '{"target": ..., "num_callers": ...}'

Messages are made once and answers are not decoded, so that callers take as little of the machine as they can.
"""

import asyncio
import json
import os
import random
import sys
import time
from collections import Counter
from typing import Any

import grpc

from kvtier.v1 import kvcache_pb2 as pb
from kvtier.v1 import types_pb2
from kvtier.v1.errors import DETAIL_KEY

METHOD = "/kvtier.v1.KVCacheService/Lookup"
LEAST_WAIT_S = 0.01  # of a patient caller after a refusal


class Tally:
    """What all callers of this process got."""

    def __init__(self) -> None:
        #: When each call began, in seconds from the start, and the milliseconds that it took.
        self.accepted: list[tuple[float, float]] = []
        self.refused: list[tuple[float, float]] = []
        self.told_s = 0.0  # to wait, all refusals together
        self.counts: Counter[str] = Counter()  # of calls that ended otherwise


async def call_until(call: Any, task: dict[str, Any], request: bytes, start_at: float, tally: Tally) -> None:
    """One caller: one call after the other."""
    ends_at = start_at + task["seconds"]
    metadata = (("authorization", f"Bearer {task['token']}"),)
    while (began_at := time.monotonic()) < ends_at:
        wait_s = 0.0
        try:
            await call(request, metadata=metadata, timeout=task["deadline_s"])
            tally.accepted.append((began_at - start_at, (time.monotonic() - began_at) * 1e3))
        except grpc.aio.AioRpcError as problem:
            spent_ms = (time.monotonic() - began_at) * 1e3
            beside = dict(problem.trailing_metadata() or ())
            if problem.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and DETAIL_KEY in beside:
                tally.refused.append((began_at - start_at, spent_ms))
                hint_s = types_pb2.ErrorDetail.FromString(beside[DETAIL_KEY]).retry_after_ms / 1000
                tally.told_s += hint_s
                wait_s = max(hint_s, LEAST_WAIT_S) * random.uniform(1.0, 1.2)
            else:
                tally.counts[problem.code().name] += 1
        await asyncio.sleep(min(wait_s, max(0.0, ends_at - time.monotonic())))


async def run(task: dict[str, Any]) -> dict[str, Any]:
    """Run all callers; return what they got."""
    os.nice(task["niceness"])
    options = [("grpc.use_local_subchannel_pool", 1)]  # a connection for each channel
    channels = [grpc.aio.insecure_channel(task["target"], options) for _ in range(task["num_channels"])]
    calls: list[Any] = [channel.unary_unary(METHOD) for channel in channels]
    await asyncio.gather(*(channel.channel_ready() for channel in channels))
    hashes = b"".join(number.to_bytes(32, "little") for number in range(1, task["num_hashes"] + 1))
    request = pb.LookupRequest(namespace_id=task["namespace_id"], prefix_hashes=hashes).SerializeToString()
    tally = Tally()
    began_at = time.monotonic()
    callers = (
        call_until(calls[number % len(calls)], task, request, began_at, tally)
        for number in range(task["num_callers"])
    )
    await asyncio.gather(*callers)
    seconds = time.monotonic() - began_at
    for channel in channels:
        await channel.close()
    return result_of(tally, seconds)


def result_of(tally: Tally, seconds: float) -> dict[str, Any]:
    """Return what the callers of a process got, as it is printed."""
    num_cancelled, num_late = tally.counts["CANCELLED"], tally.counts["DEADLINE_EXCEEDED"]
    return {
        "seconds": seconds,
        "accepted": tally.accepted,
        "refused": tally.refused,
        "told_s": tally.told_s,
        "num_cancelled": num_cancelled,
        "num_late": num_late,
        "num_other": tally.counts.total() - num_cancelled - num_late,
        "other": dict(tally.counts),
    }


if __name__ == "__main__":
    print(json.dumps(asyncio.run(run(json.loads(sys.argv[1])))))
