"""The in-process engine's remote storage plug-in: LMCache's RemoteConnector over kvtier.

LMCache calls coroutines on its one event loop, and a few functions from threads of its own; kvtier's client
blocks for as long as a copy takes. So lookups, reads and writes each have a thread and a client: a lookup
never waits behind a copy, a read never behind a write. The asynchronous client was rejected: its copies of
megabytes would run on LMCache's loop, between other coroutines.

Only whole chunks are kept, in the size the engine's metadata fixes. What is refused when the connector is
made (LMCache logs it and goes on without a remote tier): codecs that change that size, and layer-wise mode.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from lmcache.v1.storage_backend.connector import ConnectorAdapter, ConnectorContext
from lmcache.v1.storage_backend.connector.base_connector import RemoteConnector

from ..connector.guard import Guard
from ..connector.versions import check_version
from ..errors import InvalidRequest
from .chunks import ChunkKind, ChunkStore, chunk_name
from .options import ChunkOptions

T = TypeVar("T")
SCHEME = "plugin://kvtier"
RAW = ("naive", None)  # remote_serde that leaves bytes as they are
PARTIAL_CHUNK = "PARTIAL_CHUNK"  # cause of a miss: shorter than a chunk
NO_MEMORY = "NO_MEMORY"  # cause of a miss: LMCache had no buffer to read into


class KvtierConnectorAdapter(ConnectorAdapter):
    """What LMCache instantiates for `remote_storage_plugins: ["kvtier"]`."""

    def __init__(self) -> None:
        super().__init__(SCHEME)

    def create_connector(self, context: ConnectorContext) -> RemoteConnector:
        """Raises InvalidRequest for a set-up that cannot work, naming why."""
        return KvtierConnector(context)


class KvtierConnector(RemoteConnector):
    """Chunks of one engine in one daemon. No call raises; what goes wrong is a miss, counted in `guard`."""

    def __init__(self, context: ConnectorContext) -> None:
        import lmcache

        check_version("LMCache", lmcache.__version__)
        config, metadata = context.config, context.metadata
        if config is None or metadata is None:
            raise InvalidRequest("LMCache gave neither configuration nor metadata")
        if config.remote_serde not in RAW:
            raise InvalidRequest(f"remote_serde is {config.remote_serde!r}; kvtier needs 'naive'")
        if config.use_layerwise:
            raise InvalidRequest("use_layerwise cuts chunks by layer; turn it off to use kvtier")
        super().__init__(config, metadata)
        prefix = f"remote_storage_plugin.{context.plugin_name or 'kvtier'}."
        options = ChunkOptions.of(
            {
                name.removeprefix(prefix): value
                for name, value in (config.extra_config or {}).items()
                if name.startswith(prefix) and name.removeprefix(prefix) not in ("module_path", "class_name")
            }
        )
        self.kind = ChunkKind(
            metadata.model_name,
            self.full_chunk_size_bytes,
            metadata.chunk_size,
            f"{self.meta_shapes} {self.meta_dtypes} {self.meta_fmt} {metadata.world_size}",
            options.weights_digest(metadata.model_name),
        )
        self.kind.identity()  # says now what is wrong with it
        self.guard = Guard("kvtier.lmcache")
        self._memory = context.local_cpu_backend
        self._lookups = ChunkStore(options.client("lookups", puts=False))
        self._reads = ChunkStore(options.client("reads", puts=False))
        self._writes = ChunkStore(options.client("writes", puts=True))
        self._lookup_thread = ThreadPoolExecutor(1, "kvtier-lookup")
        self._read_thread = ThreadPoolExecutor(1, "kvtier-read")
        self._write_thread = ThreadPoolExecutor(1, "kvtier-write")

    # ------------------------------------------------------------------------------------ lookup

    def batched_contains(self, keys: Sequence[Any]) -> int:
        """Return how many of the first keys are stored here or fetched from an object store.

        Blocks; LMCache calls it from its own threads."""
        names = _names(keys)
        return self.guard.ask("lookup", lambda: self._lookups.available(self.kind, names)) or 0

    def exists_sync(self, key: Any) -> bool:
        """Whether one key is stored. Blocks."""
        return self.batched_contains([key]) == 1

    async def batched_async_contains(self, lookup_id: str, keys: Sequence[Any], pin: bool = False) -> int:
        """Return how many of the first keys are stored. kvtier promises nothing for it: a read may miss."""
        return await self._run(self._lookup_thread, lambda: self.batched_contains(keys), 0)

    async def exists(self, key: Any) -> bool:
        """Whether one key is stored."""
        return await self.batched_async_contains("", [key]) == 1

    def support_batched_contains(self) -> bool:
        """Return True: LMCache asks for many keys at a time."""
        return True

    # -------------------------------------------------------------------------------------- read

    async def batched_get(self, keys: Sequence[Any]) -> list[Any]:
        """Return one memory object per key, None from the first that is not there on."""
        found = await self.batched_get_non_blocking("", keys)
        return [*found, *[None] * (len(keys) - len(found))]

    async def get(self, key: Any) -> Any:
        """Return the memory object of a key, None when it is not there."""
        return (await self.batched_get([key]))[0]

    async def batched_get_non_blocking(self, lookup_id: str, keys: Sequence[Any]) -> list[Any]:
        """Return the memory objects of the first keys that are there. The caller owns one reference each."""
        reading = asyncio.get_running_loop().run_in_executor(self._read_thread, self._read, keys)
        try:
            return await asyncio.shield(reading)
        except asyncio.CancelledError:  # the thread still writes into them: give them back when it is done
            reading.add_done_callback(lambda done: _give_back(done.result()))
            raise

    def support_batched_get(self) -> bool:
        """Return True: LMCache reads many chunks at a time."""
        return True

    def _read(self, keys: Sequence[Any]) -> list[Any]:
        objects: list[Any] = []
        names = _names(keys)
        num_stored = self.guard.ask("lookup", lambda: self._reads.available(self.kind, names)) or 0
        allocated = self.guard.ask("allocate", lambda: self._allocate(num_stored, objects))
        num_read = 0
        if allocated and objects:
            buffers = [one.byte_array for one in objects]
            num_read = (
                self.guard.ask("read", lambda: self._reads.read(self.kind, names[: len(buffers)], buffers))
                or 0
            )
        _give_back(objects[num_read:])
        return objects[:num_read]

    def _allocate(self, number: int, objects: list[Any]) -> bool:
        """Append up to `number` buffers of LMCache's to `objects`; fewer when it has no more."""
        while len(objects) < number:
            one = self._memory.allocate(self.meta_shapes, self.meta_dtypes, self.meta_fmt)
            if one is None:
                self.guard.count(NO_MEMORY)
                break
            objects.append(one)
        return True

    # ------------------------------------------------------------------------------------- write

    async def batched_put(self, keys: Sequence[Any], memory_objs: Sequence[Any]) -> None:
        """Store chunks. LMCache keeps the memory objects until this returns, and gives them back itself.
        Should it be cancelled, the thread still reads them: so they are ours as well until it is done."""
        writing = asyncio.get_running_loop().run_in_executor(
            self._write_thread, self._write, list(keys), list(memory_objs)
        )
        ours = [one for one in memory_objs if one is not None]
        for one in ours:
            one.ref_count_up()
        writing.add_done_callback(lambda _: _give_back(ours))
        await asyncio.shield(writing)

    async def put(self, key: Any, memory_obj: Any) -> None:
        """Store one chunk."""
        await self.batched_put([key], [memory_obj])

    def support_batched_put(self) -> bool:
        """Return True: LMCache stores many chunks at a time."""
        return True

    def _write(self, keys: list[Any], objects: list[Any]) -> None:
        whole = [
            (key, one)
            for key, one in zip(keys, objects, strict=True)
            if one is not None and one.get_size() == self.kind.chunk_bytes
        ]
        self.guard.count(PARTIAL_CHUNK, len(keys) - len(whole))
        names, buffers = _names(key for key, _ in whole), [one.byte_array for _, one in whole]
        if whole:
            kept = self.guard.ask("write", lambda: self._writes.write(self.kind, names, buffers))
            self.guard.count("NO_ROOM", kept.count(False) if kept else 0)

    # ------------------------------------------------------------------------------------ the rest

    async def list(self) -> list[str]:
        """Return nothing: kvtier knows chunks by hashes of their keys."""
        return []

    def remove_sync(self, key: Any) -> bool:
        """Return False: kvtier evicts by itself."""
        return False

    async def close(self) -> None:
        """Finish what is under way and leave the daemon."""
        for thread in (self._lookup_thread, self._read_thread, self._write_thread):
            thread.shutdown(wait=True)
        for store in (self._lookups, self._reads, self._writes):
            self.guard.give_back("close", store.close)

    async def _run(self, thread: ThreadPoolExecutor, call: Callable[[], T], default: T) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(thread, call)
        except RuntimeError:  # closed meanwhile
            return default


def _names(keys: Any) -> list[bytes]:
    return [chunk_name(key.to_string()) for key in keys]


def _give_back(objects: Sequence[Any]) -> None:
    for one in objects:
        one.ref_count_down()
