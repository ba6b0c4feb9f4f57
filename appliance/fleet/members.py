"""FleetMembers: the addresses of the hosts of a fleet, from a list of names, from DNS and from a directory.

Each name stands for all its addresses, so that one name of a headless service is a whole fleet. Nothing else
is believed of them: that a host is there, and which one it is, its own stream says (hosts.py). A name that
cannot be resolved any more keeps the addresses it had. Names are looked up at the same time, NUM_LOOKUPS at
most, in threads of their own: one that is not answered delays no other name and no other work.
"""

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from ...v1.addresses import join_port

log = logging.getLogger(__name__)

RESOLVE_S: Final = 10.0
NUM_LOOKUPS: Final = 16
MAX_ADDRESSES: Final = 256


def within_bound(known: frozenset[str], found: frozenset[str], bound: int = MAX_ADDRESSES) -> frozenset[str]:
    """Return at most `bound` of `found`: those that are known already, then others by their text."""
    return frozenset(sorted(found, key=lambda one: (one not in known, one))[:bound])


class FleetMembers:
    """Calls `changed` with all addresses, host:port, whenever they are others."""

    def __init__(self, names: Sequence[str], changed: Callable[[frozenset[str]], None]) -> None:
        self._changed = changed
        self._names = [name for name in names if not _is_numeric(name)]
        self._listed = frozenset(names) - frozenset(self._names)
        self._met: frozenset[str] = frozenset()
        self._resolved: dict[str, frozenset[str]] = {}
        self._told: frozenset[str] = frozenset()
        self._is_beyond = False  # said once, not every time

    async def run(self) -> None:
        """Look up each name every RESOLVE_S, until cancelled."""
        self._tell()
        if not self._names:
            return
        lookups = ThreadPoolExecutor(NUM_LOOKUPS, thread_name_prefix="kvtier-names")
        try:
            async with asyncio.TaskGroup() as following:
                for name in self._names:
                    following.create_task(self._follow(name, lookups))
        finally:
            lookups.shutdown(wait=False, cancel_futures=True)

    def set_met(self, addresses: Iterable[str]) -> None:
        """Take in the addresses of a directory."""
        self._met = frozenset(addresses)
        self._tell()

    def _tell(self) -> None:
        found = self._listed.union(self._met, *self._resolved.values())
        if (is_beyond := len(found) > MAX_ADDRESSES) and not self._is_beyond:
            log.warning("peers: %d addresses; %d are used", len(found), MAX_ADDRESSES)
        self._is_beyond = is_beyond
        addresses = within_bound(self._told, found)
        if addresses != self._told:
            self._told = addresses
            self._changed(addresses)

    async def _follow(self, name: str, lookups: ThreadPoolExecutor) -> None:
        """Take in the addresses of one name until cancelled."""
        host, _, port = name.rpartition(":")
        loop, problem = asyncio.get_running_loop(), ""
        while True:
            try:
                found = await loop.run_in_executor(lookups, _look_up, host)
            except (OSError, UnicodeError) as failure:
                if str(failure) != problem:
                    log.warning("peers.hosts: %s is not resolved: %s", host, failure)
                problem = str(failure)
            else:
                problem = ""
                self._resolved[name] = frozenset(join_port(one, port) for one in found)
                self._tell()
            await asyncio.sleep(RESOLVE_S)


def _look_up(host: str) -> set[str]:
    """Return the addresses of a name. Blocks; raises OSError, UnicodeError for what no name can be."""
    return {str(answer[4][0]) for answer in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}


def _is_numeric(name: str) -> bool:
    try:
        ipaddress.ip_address(name.rpartition(":")[0].strip("[]"))
    except ValueError:
        return False
    return True
