"""Dynamo's standalone indexer and selection service as processes, and what publishes events to them."""

import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgpack
import zmq

from kvtier.clients.vllm.scheduler.announcer import Announced, event_fields

from ..ports import free_port
from ..vllm.unit.announcing_scene import GROUP, Engine
from ..waiting import until

WAIT_S = 120.0
MODEL = "m"
KINDS: list[tuple[str, int | None]] = [("full_attention", None)]


class Service:
    """A program of Dynamo's at an HTTP port of 0.0.0.0: it has no setting for less, and no authentication."""

    def __init__(self, module: str, folder: Path) -> None:
        self.port = free_port()
        self._log = (folder / f"{module}.log").open("wb")
        command = [sys.executable, "-m", module, "--port", str(self.port), "--threads", "1"]
        self._process = subprocess.Popen(command, stdout=self._log, stderr=self._log)

    def __enter__(self) -> Self:
        until(self._answers)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.wait(60)
        self._log.close()

    def call(self, path: str, **body: Any) -> Any:
        """POST a body, or GET without one; return the answer."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            data=json.dumps(body).encode() if body else None,
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read() or b"null")

    def _answers(self) -> bool:
        assert self._process.poll() is None, "it has ended; see its log"
        try:
            self.call("/workers")
        except (urllib.error.URLError, ConnectionError):
            return False
        return True


class Indexer(Service):
    """`python -m dynamo.indexer`."""

    def __init__(self, folder: Path) -> None:
        super().__init__("dynamo.indexer", folder)

    def register(self, worker: int, endpoint: str, rank: int = 0, **more: Any) -> None:
        """Make it listen to the events of a worker."""
        self.call(
            "/register",
            instance_id=worker,
            endpoint=endpoint,
            model_name=MODEL,
            block_size=GROUP.block_tokens,
            dp_rank=rank,
            **more,
        )

    def counted(self, worker: int, tokens: Iterable[int]) -> dict[str, int]:
        """Return how many of the tokens a worker has, by the slowest tier that they may come from."""
        answer = self.call("/query", token_ids=list(tokens), model_name=MODEL)
        found = answer["instances"].get(str(worker), {})
        return {tier: found.get(tier, 0) for tier in ("gpu", "cpu", "disk")}

    def until(self, worker: int, tokens: Iterable[int], gpu: int = 0, cpu: int = 0, disk: int = 0) -> None:
        """Wait until it counts so many tokens."""
        wanted, tokens = {"gpu": gpu, "cpu": cpu, "disk": disk}, list(tokens)
        until(lambda: self.counted(worker, tokens) == wanted, lambda: self.counted(worker, tokens))


class Stream:
    """Publishes batches of events as vLLM's ZmqEventPublisher does, from `first` on."""

    def __init__(self, path: Path, rank: int = 0, first: int = 0) -> None:
        self.endpoint = f"ipc://{path}"
        self.number = first
        self._rank = rank
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.XPUB)
        self._socket.bind(self.endpoint)

    def until_heard(self) -> None:
        """Wait for a listener: a publisher drops what it sends before."""
        assert self._socket.poll(int(WAIT_S * 1000))
        assert self._socket.recv() == b"\x01"

    def send(self, *events: dict[str, Any]) -> None:
        batch = msgpack.packb([time.time(), events, self._rank])
        self._socket.send_multipart([b"", self.number.to_bytes(8, "big"), batch])
        self.number += 1

    def close(self) -> None:
        self._context.destroy(0)


class PublishingEngine(Engine):
    """An engine with two tensor-parallel ranks that publishes what the connector announces."""

    def __init__(self, folder: Path, stream: Stream, **more: Any) -> None:
        self.stream = stream
        super().__init__(folder, **more)

    def publish(self, changes: Announced) -> None:
        events = [
            {"type": name, **fields} for name, fields in event_fields(changes, [GROUP], KINDS, low_half)
        ]
        if events:
            self.stream.send(*events)

    def close(self) -> None:
        super().close()
        self.stream.close()


def low_half(name: bytes) -> int:
    """Return a block hash as vLLM's `maybe_convert_block_hash` does by default."""
    return int.from_bytes(name, "big") & ((1 << 64) - 1)


def stored(names: list[int], tokens: list[int], **fields: Any) -> dict[str, Any]:
    """Return a BlockStored of the start of a chain."""
    return {
        "type": "BlockStored",
        "block_hashes": names,
        "parent_block_hash": None,
        "token_ids": tokens,
        "block_size": GROUP.block_tokens,
        "lora_id": None,
        "medium": "CPU",
        "lora_name": None,
        **fields,
    }
