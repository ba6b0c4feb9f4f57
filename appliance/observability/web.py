"""Web: what the HTTP listener answers. docs/web-api.md is its contract.

/              the page                       /metrics        for Prometheus
/api/snapshot  everything the page draws      /healthz        200 while the process is worth keeping
/api/stream    the same, once a second        /readyz         200 while calls are served, else 503 and why
"""

import json
import mimetypes
from collections.abc import AsyncGenerator, Iterator
from functools import partial
from pathlib import Path as FilePath

from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector, CollectorRegistry

from .daemon_view import FAILED, READY, DaemonView
from .http_server import BadRequest, HttpResponse, Path, Query
from .metrics import Family
from .metrics_table import METRICS
from .sampler import CAPACITY
from .snapshot import Snapshots

PAGE = FilePath(__file__).parent / "page"
INDEX = "index.html"
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class _Collector(Collector):
    def __init__(self, view: DaemonView) -> None:
        self._view = view

    def collect(self) -> Iterator[Family]:
        """Yield every metric as it is now."""
        for metric in METRICS:
            yield metric.family(self._view)


def exposition(view: DaemonView) -> bytes:
    """Return all metrics in Prometheus's text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(view))
    return bytes(generate_latest(registry))


def paths(view: DaemonView, with_names: bool) -> dict[str, Path]:
    """Return what is served, by path. `with_names`: every reader may see names."""
    snapshots = Snapshots(view)
    served: dict[str, Path] = {
        "/metrics": lambda query: HttpResponse(exposition(view), METRICS_TYPE),
        "/healthz": lambda query: _verdict(view.state() != FAILED, view),
        "/readyz": lambda query: _verdict(view.state() == READY, view),
        "/api/snapshot": lambda query: _snapshot(snapshots, _history(query), with_names),
        "/api/stream": lambda query: HttpResponse(
            content_type="text/event-stream",
            stream=_stream(view, snapshots, _history(query), with_names),
        ),
    }
    for file in sorted(PAGE.iterdir()) if PAGE.is_dir() else ():
        kind = mimetypes.guess_type(file.name)[0] or "application/octet-stream"
        answer = HttpResponse(
            file.read_bytes(), f"{kind}; charset=utf-8" if kind.startswith("text/") else kind
        )
        served["/" if file.name == INDEX else f"/{file.name}"] = partial(_file, answer)
    return served


def _file(answer: HttpResponse, query: Query) -> HttpResponse:
    return answer


def _history(query: Query) -> int:
    """Return how many samples of the past are wanted."""
    text = query.get("history", str(CAPACITY))
    if not text.isdecimal() or len(text) > len(str(CAPACITY)) or int(text) > CAPACITY:
        raise BadRequest(f"history is a number of samples, 0 to {CAPACITY}")
    return int(text)


def _snapshot(snapshots: Snapshots, num_samples: int, with_names: bool) -> HttpResponse:
    return HttpResponse(_json(snapshots.take(num_samples, with_names)), "application/json")


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


async def _stream(
    view: DaemonView, snapshots: Snapshots, num_samples: int, with_names: bool
) -> AsyncGenerator[bytes, None]:
    """Yield a snapshot with the past, then one per sample with what that sample adds."""
    sampler = view.sampler
    while True:
        seen = sampler.num_taken
        yield b"event: snapshot\ndata: " + _json(snapshots.take(num_samples, with_names)) + b"\n\n"
        await sampler.after(seen)
        num_samples = sampler.num_taken - seen


def _verdict(is_well: bool, view: DaemonView) -> HttpResponse:
    offline = ", ".join(sorted(tier.label for tier in view.planner.core.offline))
    stalled = ", ".join(view.health.stalled)
    words = (
        view.state() + (f": {stalled}" if stalled else "") + (f"; {offline} is offline" if offline else "")
    )
    return HttpResponse(f"{words}\n".encode(), status=200 if is_well else 503)
