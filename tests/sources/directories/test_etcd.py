"""What an etcd answers that is not as it should be."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from kvtier.sources.directories.addresses import DirectoryAccess, DirectoryError, parse_address
from kvtier.sources.directories.etcd import EtcdDirectory
from kvtier.sources.directories.records import HostRecord

from ...appliance.loops import run


def test_a_stream_that_ends_without_an_answer_is_an_error_of_the_directory() -> None:
    """Before: StopIteration, which no coroutine can raise."""
    silent: Any = grpc.stream_stream_rpc_method_handler(lambda requests, context: iter(()))
    server = grpc.server(ThreadPoolExecutor(1))
    handler = grpc.method_handlers_generic_handler("etcdserverpb.Lease", {"LeaseKeepAlive": silent})
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()

    async def main() -> None:
        directory = EtcdDirectory(parse_address(f"etcd://127.0.0.1:{port}"), DirectoryAccess())
        directory._lease = 1
        try:
            with pytest.raises(DirectoryError, match="no answer"):
                async with asyncio.timeout(10):
                    await directory.meet(HostRecord(1, "10.0.0.1:7070", "own"))
        finally:
            await directory.close()

    try:
        run(main())
    finally:
        server.stop(None)
