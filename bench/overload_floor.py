"""A bare grpc.aio server that decides in the first line of its handler: the floor of bench.overload.

    python -m bench.overload_floor '{"path": ..., "refused_share": 0.3, "told_ms": 100}'

Refuses this share of the calls before their message is read, and tells each to come back after `told_ms`,
both as kvtier did in the run beside; answers the others with an empty message. Options are those of kvtier's
server. Neither identity, nor a cache, nor a proxy: what its callers wait for is gRPC and the machine.
"""

import asyncio
import json
import random
import sys
from typing import Any

import grpc

from kvtier.appliance.errors import error, trailing_metadata
from kvtier.appliance.server.grpc_server import OPTIONS

from .overload_callers import METHOD


async def serve(path: str, refused_share: float, told_ms: float) -> None:
    """Serve until the process is ended."""
    dice = random.Random(1)

    async def answer(requests: Any, context: "grpc.aio.ServicerContext[Any, Any]") -> bytes:
        if dice.random() < refused_share:
            problem = error("TOO_MANY_IN_FLIGHT", "too many calls wait", retry_after_s=told_ms / 1000)
            code = grpc.StatusCode.RESOURCE_EXHAUSTED
            await context.abort(code, problem.message, trailing_metadata(problem))
        await context.read()
        return b""

    _, service, method = METHOD.split("/")
    handler: Any = grpc.stream_unary_rpc_method_handler(answer)
    server = grpc.aio.server(options=list(OPTIONS.items()))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
    server.add_insecure_port(f"unix://{path}")
    await server.start()
    print("serving", flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    task = json.loads(sys.argv[1])
    asyncio.run(serve(task["path"], task["refused_share"], task["told_ms"]))
