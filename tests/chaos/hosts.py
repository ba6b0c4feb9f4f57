"""Hosts of a fleet under load, and what is asked of them whatever is done to them or to their directory."""

import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from kvtier.clients import Client, KvtierError
from kvtier.v1 import admin_pb2
from tests.daemon import PATIENT, Daemon

from ..waiting import until
from .content import CHAIN_BLOCKS, IDENTITY, names_of, payload_of, wrong_words
from .load import Load, Role
from .worker import SAID_CALLS

MEET_S = 60.0
TRIES = 30  # to read a chain before another one is put
#: A call that ended so found no daemon, or one that did not answer in time.
UNANSWERED = ("NO_ANSWER", "NOT_RUNNING", "TIMEOUT", "DEADLINE_EXCEEDED")
SETTINGS = ("tiers.dram.capacity=96MiB", "tiers.dram.extent=4MiB", "observe.http=off")


class FleetHost:
    """One host: its daemon, and the load on it."""

    def __init__(
        self,
        folder: Path,
        number: int,
        address: str,
        settings: Sequence[str],
        pause_s: float,
        prefix: Sequence[str] = (),
    ) -> None:
        own = folder / f"host{number}"
        own.mkdir()
        self.address = address
        settings = (*SETTINGS, *settings)
        self.daemon = Daemon(own, settings=settings, arguments=("--listen", address), prefix=prefix)
        self.load = Load(folder, self.daemon.target, pause_s=pause_s, first=1 + number * 8)

    def start(self) -> None:
        """Start the daemon and two workers."""
        self.daemon.start()
        for is_grpc in (False, True):
            self.load.start(Role(is_grpc=is_grpc))

    def status(self) -> admin_pb2.GetStatusResponse:
        """Return what `kvtier status` shows."""
        return self.daemon.status()

    def problems(self) -> list[str]:
        """Audit the daemon."""
        return self.daemon.audit()

    def is_serving(self) -> bool:
        """Whether it answers."""
        try:
            with Client(self.daemon.target, timeout=PATIENT) as client:
                client.register(IDENTITY)
            return True
        except KvtierError:
            return False

    def put(self, number: int) -> None:
        """Put a chain."""
        with Client(self.daemon.target, timeout=PATIENT) as client:
            report = client.put(client.register(IDENTITY), names_of(number), payload_of(0, number))
        assert report.complete, f"a put on {self.address}: {report}"

    def num_read(self, number: int) -> int:
        """Read a chain; return how many of its blocks were there. Raises AssertionError for a wrong byte."""
        with Client(self.daemon.target, timeout=PATIENT) as client:
            report = client.get(client.register(IDENTITY), names_of(number))
        assert not (problem := wrong_words(report.data.view("u8"), 0, number)), problem
        return report.num_blocks

    def troubles(self) -> tuple[int, int]:
        """How many calls of its workers found no daemon, and how many gets took long."""
        counts = self.load.counts()
        return sum(counts[f"refused: {reason}"] for reason in UNANSWERED), counts["gets over 2 s"]


class HostsUnderLoad:
    """Hosts, and what is judged."""

    def __init__(self, hosts: list[FleetHost]) -> None:
        self.hosts = hosts
        self._pause = threading.Event()
        self._next = 1 << 40  # numbers of chains that no worker puts

    def close(self) -> None:
        """Leave nothing behind."""
        for host in self.hosts:
            host.load.kill_all()
            host.daemon.close()

    def _wait_for_load(self) -> None:
        for host in self.hosts:
            host.load.wait_until_read()

    def _wait_for_calls(self, host: FleetHost) -> None:
        """Wait until the workers of a host have said how their latest calls ended, after a fault of that."""
        num_calls = {id(worker): worker.counts()["calls"] for worker in host.load.running}

        def have_called() -> bool:
            host.load.assert_alive()
            return all(
                one.counts()["calls"] >= num_calls[id(one)] + 2 * SAID_CALLS for one in host.load.running
            )

        until(have_called, f"workers on {host.address} stand still", pause_s=0.05)

    def _assert_unharmed(self, number: int, before: list[tuple[int, int]]) -> int:
        """All workers live, and on hosts that nothing was done to every call was answered; return how many
        gets there took long."""
        num_all_slow = 0
        for host, (num_unanswered, num_slow) in zip(self.hosts, before, strict=True):
            host.load.assert_alive()
            if host is not self.hosts[number]:
                now = host.troubles()
                assert now[0] == num_unanswered, f"{host.address} did not answer: {host.load.counts()}"
                num_all_slow += now[1] - num_slow
        return num_all_slow

    def _assert_meet(self) -> None:
        """Each host sees the others, and reads what each of them puts now."""
        ends_at = time.monotonic() + MEET_S
        for reader in self.hosts:
            for writer in self.hosts:
                self._assert_reads(reader, writer, ends_at)

    def _assert_reads(self, reader: FleetHost, writer: FleetHost, ends_at: float) -> None:
        """`reader` reads what `writer` puts now, before a time. Memory is full: where another chain took the
        place of that one before it was read, the next one is put. So it is where that one is not read soon: a
        bundle that did not arrive in time is not asked for again for a minute."""
        while True:
            self._next += 1
            writer.put(self._next)
            for _ in range(TRIES):
                if writer.num_read(self._next) < CHAIN_BLOCKS:
                    break
                if reader is writer or reader.num_read(self._next) == CHAIN_BLOCKS:
                    return
                self._pause.wait(0.1)
            assert time.monotonic() < ends_at, (
                f"{reader.address} does not read what {writer.address} puts: {reader.status()}"
            )

    def _end(self) -> Counter[str]:
        total: Counter[str] = Counter()
        for host in self.hosts:
            host.load.end_all()
            total.update(host.load.counts())
            counters = host.status().counters
            total.update({name: counters[name] for name in counters if name.startswith("peer_")})
            assert (problems := host.problems()) == [], problems
            assert host.daemon.stop() == 0, "SIGTERM ended a daemon with an error"
            log = host.daemon.log.read_text()
            assert "Traceback" not in log, log[log.find("Traceback") - 300 :][:3000]
        assert total["peer_bytes_received"], f"nothing was read from another host: {total}"
        return total
