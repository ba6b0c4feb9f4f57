"""Web: what the HTTP listener answers. docs/web-api.md is its contract.

/              the page                       /metrics        for Prometheus
/api/snapshot  everything the page draws      /healthz        200 while the process is worth keeping
/api/stream    the same, once a second        /readyz         200 while calls are served, else 503 and why
"""

import json
import mimetypes
from collections.abc import AsyncGenerator
from functools import partial
from pathlib import Path as FilePath

from .daemon_view import FAILED, READY, Eyes
from .exposition import CONTENT_TYPE, exposition
from .http_server import Answer, BadRequest, Path, Query
from .sampler import CAPACITY
from .snapshot import Snapshots

PAGE = FilePath(__file__).parent / "page"
INDEX = "index.html"


def paths(eyes: Eyes, with_names: bool) -> dict[str, Path]:
    """Return what is served, by path. `with_names`: whoever can connect may see names."""
    snapshots = Snapshots(eyes)
    served: dict[str, Path] = {
        "/metrics": lambda query: Answer(exposition(eyes), CONTENT_TYPE),
        "/healthz": lambda query: _verdict(eyes.state() != FAILED, eyes),
        "/readyz": lambda query: _verdict(eyes.state() == READY, eyes),
        "/api/snapshot": lambda query: _snapshot(snapshots, _history(query), with_names),
        "/api/stream": lambda query: Answer(
            content_type="text/event-stream",
            stream=_stream(eyes, snapshots, _history(query), with_names),
        ),
    }
    for file in sorted(PAGE.iterdir()) if PAGE.is_dir() else ():
        kind = mimetypes.guess_type(file.name)[0] or "application/octet-stream"
        answer = Answer(file.read_bytes(), f"{kind}; charset=utf-8" if kind.startswith("text/") else kind)
        served["/" if file.name == INDEX else f"/{file.name}"] = partial(_file, answer)
    return served


def _file(answer: Answer, query: Query) -> Answer:
    return answer


def _history(query: Query) -> int:
    """Return how many samples of the past are wanted."""
    text = query.get("history", str(CAPACITY))
    if not text.isdecimal() or len(text) > len(str(CAPACITY)) or int(text) > CAPACITY:
        raise BadRequest(f"history is a number of samples, 0 to {CAPACITY}")
    return int(text)


def _snapshot(snapshots: Snapshots, num_samples: int, with_names: bool) -> Answer:
    return Answer(_json(snapshots.take(num_samples, with_names)), "application/json")


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


async def _stream(
    eyes: Eyes, snapshots: Snapshots, num_samples: int, with_names: bool
) -> AsyncGenerator[bytes, None]:
    """Yield a snapshot with the past, then one per sample with what that sample adds."""
    sampler = eyes.sampler
    while True:
        seen = sampler.num_taken
        yield b"event: snapshot\ndata: " + _json(snapshots.take(num_samples, with_names)) + b"\n\n"
        await sampler.after(seen)
        num_samples = sampler.num_taken - seen


def _verdict(is_well: bool, eyes: Eyes) -> Answer:
    offline = ", ".join(sorted(tier.label for tier in eyes.planner.core.offline))
    stalled = ", ".join(eyes.health.stalled)
    words = (
        eyes.state() + (f": {stalled}" if stalled else "") + (f"; {offline} is offline" if offline else "")
    )
    return Answer(f"{words}\n".encode(), status=200 if is_well else 503)
