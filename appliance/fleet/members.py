"""Members: the addresses of the hosts of a fleet, from a list and from DNS.

Nothing else is believed of them: that a host is there, and which one it is, its own stream says (hosts.py). A
name that cannot be resolved any more changes nothing.
"""

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence
from typing import Final

from ..config.peers import MAX_HOSTS

log = logging.getLogger(__name__)

RESOLVE_S: Final = 10.0


class Members:
    """Calls `changed` with all addresses, host:port, at first and whenever they are others."""

    def __init__(self, static: Sequence[str], dns: str, changed: Callable[[frozenset[str]], None]) -> None:
        self._static = frozenset(static)
        self._dns = dns
        self._changed = changed
        self._problem = ""

    async def run(self) -> None:
        """Look up the name every RESOLVE_S, until cancelled."""
        known = self._static
        self._changed(known)
        while self._dns:
            found = await self._resolve()
            if found is not None and self._static | found != known:
                known = self._static | found
                self._changed(known)
            await asyncio.sleep(RESOLVE_S)

    async def _resolve(self) -> frozenset[str] | None:
        """Return the addresses of the name; None when there is no answer."""
        host, _, port = self._dns.rpartition(":")
        try:
            answers = await asyncio.get_running_loop().getaddrinfo(
                host.strip("[]"), int(port), type=socket.SOCK_STREAM
            )
        except OSError as problem:
            if self._problem != str(problem):
                log.warning(
                    "peers.dns: %s is not resolved, and its hosts stay as they are: %s", host, problem
                )
            self._problem = str(problem)
            return None
        self._problem = ""
        found = sorted({str(answer[4][0]) for answer in answers})
        if len(found) > MAX_HOSTS:
            log.warning("peers.dns: %s has %d addresses; %d are used", host, len(found), MAX_HOSTS)
        return frozenset(f"[{one}]:{port}" if ":" in one else f"{one}:{port}" for one in found[:MAX_HOSTS])
