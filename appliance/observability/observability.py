"""Sight: opens the eyes and shows what they see, as the settings say. The daemon's one handle on this folder.

Optional parts (traces, events for routers) are imported when they are wanted: without their extras nothing is
loaded and nothing is paid.
"""

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from ..config import Observe
from ..errors import StartError
from ..security.principals import Access
from .daemon_view import Eyes
from .http_access import CHALLENGE, NAME_READERS, Readers
from .http_server import HttpServer
from .snapshot import Snapshots, asked
from .web import paths
from .why import Why

if TYPE_CHECKING:
    from .kv_events import KvEvents
    from .tracing import Tracing

log = logging.getLogger(__name__)


class Sight:
    """Made with the daemon; shows from `start` to `stop`."""

    def __init__(self, eyes: Eyes, settings: Observe, access: Access) -> None:
        self.eyes = eyes
        self.readers = Readers(settings, access)
        self._is_for_anyone = self.readers.is_anyone
        self.snapshots = Snapshots(eyes)
        self.why = Why(eyes.planner, eyes.telemetry)
        self.http: HttpServer | None = None
        self.kv_events: KvEvents | None = None
        self.tracing: Tracing | None = None
        self._settings = settings

    async def start(self) -> None:
        """Open the eyes and listen. Raises StartError for an address that was asked for and cannot be had."""
        self.eyes.open()
        self._trace()
        self._publish_events()
        await self._listen()

    async def _listen(self) -> None:
        wanted = self._settings.http_address
        if wanted is None:
            return
        served = paths(self.eyes, self._settings.names)
        server = HttpServer(wanted.host, wanted.port, served, self.readers.refusal, CHALLENGE)
        try:
            await server.start()
        except StartError as problem:
            if wanted.is_wanted:
                raise
            log.warning("%s; going without metrics and page", str(problem))
            return
        self.http = server
        log.info("metrics and page at %s", server.address)
        if self.readers.is_nobody:
            log.warning(NAME_READERS)

    async def stop(self) -> None:
        """Show nothing any more. Idempotent."""
        self.eyes.close()
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
        self.tracing = Tracing(exporter(self._settings.traces), self.eyes.clock)
        self.eyes.appliance.observers.append(self.tracing.stepped)
        self.eyes.service.rpcs.is_traced = True

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
        replay = "" if settings.kv_events_replay == "off" else settings.kv_events_replay
        self.kv_events = KvEvents(self.eyes.planner.catalog, settings.kv_events, replay)
        self.kv_events.start()
        self.eyes.appliance.observers.append(self.kv_events.stepped)

    def adopt(self, settings: Observe) -> None:
        """Let who reads follow the policy, and the tenants there are now: a stream of the page goes on for
        days."""
        self.readers.adopt(settings)
        was_for_anyone, self._is_for_anyone = self._is_for_anyone, self.readers.is_anyone
        if self.http is not None and was_for_anyone and not self._is_for_anyone:
            self.http.hang_up()

    def asked_by(self, session_id: str) -> dict[str, Any]:
        """Return what a session asked for, found, stored and saved."""
        return asked(self.eyes.telemetry.of(session_id))

    def snapshot(self, num_samples: int) -> dict[str, Any]:
        """Return the appliance now, names included: for administrators."""
        return self.snapshots.take(num_samples, with_names=True)
