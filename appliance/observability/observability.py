"""Observability: metrics, page, traces and events, as the settings say; the daemon's handle on this folder.

Optional parts (traces, events for routers) are imported when they are wanted: without their extras nothing is
loaded and nothing is paid.
"""

import asyncio
import ipaddress
import logging
from typing import TYPE_CHECKING

from ..config import Observe
from ..errors import StartError
from ..security.principals import Authenticator
from .daemon_view import DaemonView
from .http_access import CHALLENGE, NAME_READERS, HttpAccess
from .http_server import HttpServer
from .rank_path import PATH as RANK_PATH
from .rank_path import RankPath
from .snapshot import Snapshots
from .web import paths
from .why import Explainer

if TYPE_CHECKING:
    from .kv_events import KvEvents
    from .tracing import Tracing

log = logging.getLogger(__name__)


class Observability:
    """What the daemon shows, from `start` to `stop`."""

    def __init__(
        self, view: DaemonView, settings: Observe, access: Authenticator, ranks: RankPath | None = None
    ) -> None:
        self.view = view
        self.readers = HttpAccess(settings, access)
        self._readers = self.readers.is_anyone, settings.reader_tokens
        self.snapshots = Snapshots(view)
        self.why = Explainer(view.planner, view.telemetry)
        self.http: HttpServer | None = None
        self.kv_events: KvEvents | None = None
        self.tracing: Tracing | None = None
        self._settings = settings
        self._posts = {RANK_PATH: ranks.answer} if ranks is not None else {}
        if ranks is not None:
            ranks.is_exposed = self._is_exposed

    async def start(self) -> None:
        """Start sampling and listen. Raises StartError for a wanted address that cannot be had."""
        self.view.open()
        self._trace()
        self._publish_events()
        await self._listen()

    async def _listen(self) -> None:
        wanted = self._settings.http_address
        if wanted is None:
            return
        served = paths(self.view, self._settings.names)
        server = HttpServer(wanted.host, wanted.port, served, self._posts, self.readers.refusal, CHALLENGE)
        try:
            await server.start()
        except StartError as problem:
            if wanted.is_wanted:
                raise
            log.warning("%s; going without metrics and page", str(problem))
            return
        self.http = server
        log.info("metrics and page at %s", server.address)
        if self.readers.has_no_reader:
            log.warning(NAME_READERS)

    def _is_exposed(self) -> bool:
        """Return whether callers on other hosts read without a token."""
        host = self.http.host if self.http is not None else "0.0.0.0"
        return self.readers.is_anyone and not ipaddress.ip_address(host).is_loopback

    async def stop(self) -> None:
        """Stop sampling, and close the listener and what is published. Idempotent."""
        self.view.close()
        if self.kv_events is not None:
            await self.kv_events.stop()
            self.kv_events = None
        if self.tracing is not None:
            await asyncio.to_thread(self.tracing.stop)
            self.tracing = None
        if self.http is not None:
            await self.http.stop()

    def _trace(self) -> None:
        if self._settings.traces == "off":
            return
        try:
            from .tracing import Tracing, exporter
        except ImportError as missing:
            raise StartError(
                f"`observe.traces` needs {missing.name}: pip install 'kvtier[otel]'"
            ) from missing
        self.tracing = Tracing(
            exporter(self._settings.traces), self.view.clock, self.view.planner.core.ladder
        )
        self.view.appliance.observers.append(self.tracing.stepped)
        self.view.service.call_latencies.is_traced = True

    def _publish_events(self) -> None:
        settings = self._settings
        if settings.kv_events == "off":
            return
        try:
            from .kv_events import KvEvents
        except ImportError as missing:
            raise StartError(
                f"`observe.kv_events` needs {missing.name}: pip install 'kvtier[events]'"
            ) from missing
        self.kv_events = KvEvents(self.view.planner.catalog, settings.kv_events)
        self.kv_events.start()
        self.view.appliance.observers.append(self.kv_events.stepped)

    def adopt(self, settings: Observe) -> None:
        """Apply the readers and tenants of a new policy."""
        before = self._readers
        self.readers.adopt(settings)
        self._readers = self.readers.is_anyone, settings.reader_tokens
        if self._readers != before:
            self.end_revoked()

    def end_revoked(self) -> None:
        """Let readers connect again, which checks their tokens: a stream of the page may go on for days."""
        if self.http is not None and not self.readers.is_anyone:
            self.http.close_connections()
