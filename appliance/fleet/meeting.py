"""Meeting: enters this host into a directory again and again, and tells which others are there.

What the directory says only adds hosts. One that it does not name any more is kept for TTL_S, in which every
living host enters itself again after a directory was flushed; while the directory does not answer all are
kept. So losing it loses no host that is there. Whether a host is there is not asked of it (hosts.py).
"""

import asyncio
import logging
import random
import socket
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Final

from ...sources.directories.addresses import DirectoryError
from ...sources.directories.records import BEAT_S, CALL_S, MAX_RECORDS, TTL_S, HostDirectory, HostRecord, Met
from ...v1.addresses import join_port
from ..tasks import happens_within

log = logging.getLogger(__name__)

RETRY_S: Final = 1.0  # while the directory does not answer
MEET_S: Final = 10.0  # of all nodes of a directory together
WILDCARDS: Final = ("0.0.0.0", "::", "")


class KnownLives:
    """The lives of other hosts that a directory has named, by epoch, and for how long each is believed."""

    def __init__(self) -> None:
        self.records: dict[int, HostRecord] = {}
        self._until: dict[int, float] = {}

    def meet(self, found: Sequence[HostRecord], own: int, now: float) -> None:
        """Take in what the directory has named at `now`; this host's own life is left out."""
        for record in found:
            if record.epoch != own and (record.epoch in self.records or len(self.records) < MAX_RECORDS):
                self.records[record.epoch] = record
                self._until[record.epoch] = now + TTL_S
        for epoch in [epoch for epoch, until in self._until.items() if until <= now]:
            del self.records[epoch], self._until[epoch]

    def twins(self) -> dict[str, list[HostRecord]]:
        """Return the addresses at which several lives say they are, of which only one can be."""
        by_address: dict[str, list[HostRecord]] = {}
        for record in self.records.values():
            by_address.setdefault(record.address, []).append(record)
        return {address: lives for address, lives in by_address.items() if len(lives) > 1}


class Meeting:
    """Calls `changed` with the lives of other hosts, by epoch, whenever they are others.

    `address`: returns this host's own, and may ask the network. Owned by the event loop."""

    def __init__(
        self,
        directory: HostDirectory,
        own: HostRecord,
        address: Callable[[], str],
        changed: Callable[[Mapping[int, HostRecord]], None],
    ) -> None:
        self._directory = directory
        self._address = address
        self._changed = changed
        self._told: dict[int, HostRecord] = {}
        self._twins: set[str] = set()  # addresses that had several lives at the last meeting
        self._num_beats = 0
        self._is_due = asyncio.Event()
        self.own = own
        self.lives = KnownLives()
        self.problem = "it has not answered yet"  # empty: it answers
        self.counters: Counter[str] = Counter()
        #: Called after each answer; whether this host was not in the directory before.
        self.met: Callable[[bool], None] = lambda is_new: None
        #: Called when the directory begins not to answer.
        self.lost: Callable[[], None] = lambda: None

    def hurry(self) -> None:
        """Meet at once: something else says that the directory does not answer."""
        self._is_due.set()

    async def run(self) -> None:
        """Meet every BEAT_S until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                async with asyncio.timeout(MEET_S):
                    if not self.own.address:
                        self.own = self.own._replace(address=await asyncio.to_thread(self._address))
                    met = await self._directory.meet(self.own)
                self._succeeded(met, loop.time())
            except (DirectoryError, OSError) as failure:
                self._failed(str(failure) or f"no answer within {MEET_S:g} s")
            except Exception as failure:
                if self.problem != (problem := repr(failure)[:200]):
                    log.error("meeting the other hosts failed; it is tried again", exc_info=failure)
                self._failed(problem)
            pause_s = (RETRY_S if self.problem else BEAT_S) * (0.75 + random.random() / 4)
            self._is_due.clear()
            await happens_within(self._is_due, pause_s)

    async def stop(self) -> None:
        """Leave the directory, if that is quick, and close it. `run` has ended."""
        with suppress(DirectoryError, OSError):
            async with asyncio.timeout(CALL_S):
                await self._directory.leave(self.own)
        with suppress(DirectoryError, OSError):
            await self._directory.close()

    def _failed(self, problem: str) -> None:
        self.counters["directory_failed"] += 1
        if not self.problem or self.problem == "it has not answered yet":
            log.warning("the directory does not answer; hosts that are known are kept: %s", problem)
            self.lost()
        self.problem = problem

    def _succeeded(self, met: Met, now: float) -> None:
        if self.problem != met.problem:
            if met.problem:
                log.warning("the directory does not take this host: %s", met.problem)
            elif self._num_beats:
                log.info("the directory answers again")
        self.problem = met.problem
        self._num_beats += 1
        self.counters["directory_met"] += 1
        self.counters["directory_refused"] += bool(met.problem)
        self.counters["directory_entries_unreadable"] += met.num_unreadable
        self.counters["directory_entered_again"] += met.is_new and self._num_beats > 1
        self.lives.meet(met.records, self.own.epoch, now)
        self._tell_of_twins()
        if self.lives.records != self._told:
            told = dict(self.lives.records)
            self._changed(told)
            self._told = told
        self.met(met.is_new)

    def _tell_of_twins(self) -> None:
        """Warn of an address that several lives say is theirs for longer than a restart explains."""
        twins = self.lives.twins()
        for address in twins.keys() - self._twins:
            epochs = {record.epoch for record in twins[address]}
            asyncio.get_running_loop().call_later(2 * TTL_S, self._still_twins, address, epochs)
        self._twins = set(twins)

    def _still_twins(self, address: str, epochs: set[int]) -> None:
        lives = [one for one in self.lives.records.values() if one.address == address and one.epoch in epochs]
        if len(lives) > 1:
            self.counters["directory_twins"] += 1
            names = ", ".join(sorted({one.name for one in lives}))
            log.warning(
                "several hosts say they are at %s (%s); let each listen where others reach it",
                address,
                names,
            )


def own_address(listen: str, nodes: Sequence[tuple[str, int]]) -> str:
    """Return where others reach this host. Blocks; raises OSError.

    That is where it listens, or, where that is any address, the one that reaches a node of the directory."""
    host, _, port = listen.rpartition(":")
    if host.strip("[]") not in WILDCARDS:
        return listen
    *others, (name, number) = nodes
    try:
        family, kind, _, _, target = socket.getaddrinfo(name, number, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)  # sends nothing
            found = probe.getsockname()[0]
    except OSError:  # a node that is away may have no name, and another one no route
        if others:
            return own_address(listen, others)
        raise
    return join_port(found, port)
