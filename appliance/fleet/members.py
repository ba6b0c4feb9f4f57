"""FleetMembers: the addresses of the hosts of a fleet, from a list of names and from DNS.

Each name stands for all its addresses, so that one name of a headless service is a whole fleet. Nothing else
is believed of them: that a host is there, and which one it is, its own stream says (hosts.py). A name that
cannot be resolved any more keeps the addresses it had.
"""

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence
from typing import Final

log = logging.getLogger(__name__)

RESOLVE_S: Final = 10.0
MAX_ADDRESSES: Final = 256


class FleetMembers:
    """Calls `changed` with all addresses, host:port, whenever they are others."""

    def __init__(self, names: Sequence[str], changed: Callable[[frozenset[str]], None]) -> None:
        self._changed = changed
        self._known: dict[str, frozenset[str]] = {name: frozenset() for name in names}
        self._problems: dict[str, str] = {}  # said once, not every time

    async def run(self) -> None:
        """Look up the names every RESOLVE_S, until cancelled."""
        told: frozenset[str] = frozenset()
        while True:
            for name in self._known:
                await self._resolve(name)
            addresses = frozenset[str]().union(*self._known.values())
            if len(addresses) > MAX_ADDRESSES:
                log.warning("peers.hosts: %d addresses; %d are used", len(addresses), MAX_ADDRESSES)
                addresses = frozenset(sorted(addresses)[:MAX_ADDRESSES])
            if addresses != told:
                told = addresses
                self._changed(addresses)
            await asyncio.sleep(RESOLVE_S)

    async def _resolve(self, name: str) -> None:
        host, _, port = name.rpartition(":")
        try:
            answers = await asyncio.get_running_loop().getaddrinfo(
                host.strip("[]"), int(port), type=socket.SOCK_STREAM
            )
        except OSError as problem:
            if self._problems.get(name) != str(problem):
                log.warning("peers.hosts: %s is not resolved: %s", host, problem)
            self._problems[name] = str(problem)
            return
        self._problems.pop(name, None)
        found = {str(answer[4][0]) for answer in answers}
        self._known[name] = frozenset(f"[{one}]:{port}" if ":" in one else f"{one}:{port}" for one in found)
