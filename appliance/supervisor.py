"""Holds the memory tiers' memory over the death of the daemon. `kvtier serve` runs this file.

    supervisor ── fork ──> daemon           one socket between them, SOCK_SEQPACKET
       |                     | "keep NAME" + memfd, before it is sealed      -> mapped writable here
       |                     | "drop NAME"                                   -> unmapped
       |                     | "ready"                                       -> it has served
       |  the daemon dies: a new one is forked, and inherits every mapping

A sealed memfd cannot be mapped writable again, so a store of descriptors would keep bytes that no later
daemon could replace: what is handed on are mappings, and only `fork` does that. The child imports the daemon
after the fork, so an upgraded version starts with the next one. That is why this file is run by its path,
imports nothing but the standard library, and never looks into what it keeps.

The daemon ends with its supervisor (PR_SET_PDEATHSIG). Rejected: a supervisor in C (it needs a compiler),
systemd's descriptor store (see above), files in tmpfs (every process of the user can write them).
"""

import contextlib
import ctypes
import gc
import mmap
import os
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Sequence

EXIT_FAILED = 70  # of the daemon: its planner failed; what memory holds is as good as before
EXIT_RESTART = 75  # of the daemon: it was asked to make room for a new one
EXIT_REFUSED = 2  # of the daemon: its settings, files or host are wrong, whatever memory there is
EXIT_NOT_STARTED = 78  # of the daemon: it cannot start; one that inherited memory: for want of memory
FORK_RETRY_S = 1.0
REFUSED_RETRY_S = 5.0
MAX_EARLY_DEATHS = 3  # in a row, before the daemon served; before the last one memory is given up
SOON_S = 60.0  # of three planners in a row that failed as soon, memory is given up: it may be the reason
_TO_END = (signal.SIGTERM, signal.SIGINT)
_FORWARDED = (*_TO_END, signal.SIGHUP)
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE = 1, 4
_MAX_MESSAGE_BYTES = 512

Kept = dict[str, tuple[int, mmap.mmap]]  # by name: memfd, its writable mapping


class Supervisor:
    """Runs daemons one after the other until one ends by itself. `kept` outlives them."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self.kept: Kept = {}
        self._arguments = arguments
        self._child = 0
        self._is_ending = False
        self._has_served = False
        self._signals, written = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(written)
        for number in (*_FORWARDED, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)  # the number arrives through the pipe

    def run(self) -> int:
        """Return the exit code of the daemon that ended by itself; in a child the daemon's own."""
        num_early_deaths = num_soon_failures = 0
        was_served = False
        while True:
            began_at = time.monotonic()
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            supervisor = os.getpid()
            self._has_served = False
            # Blocked in the child until it can handle them; what comes meanwhile waits.
            signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
            try:
                self._child = os.fork()
            except OSError as error:  # no process to be had just now: that must not cost what is kept
                signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
                ours.close()
                theirs.close()
                if not self.kept or self._is_to_end_within(FORK_RETRY_S):
                    raise
                _report(f"cannot start a daemon ({error.strerror}); trying again")
                continue
            if not self._child:
                ours.close()
                return self._become_daemon(theirs, supervisor)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
            theirs.close()
            code = self._watch(ours)
            ours.close()
            was_served |= self._has_served
            is_to_pause = was_served and code in (EXIT_REFUSED, EXIT_NOT_STARTED)
            is_tried_again = code < 0 or code in (EXIT_FAILED, EXIT_RESTART) or (was_served and code != 0)
            if self._is_ending or not is_tried_again:
                return code if code >= 0 else 128 - code
            if code != EXIT_REFUSED:
                num_early_deaths = 0 if self._has_served else num_early_deaths + 1
                if num_early_deaths >= MAX_EARLY_DEATHS and not is_to_pause:
                    return code if code >= 0 else 128 - code
                is_soon = code == EXIT_FAILED and time.monotonic() < began_at + SOON_S
                num_soon_failures = num_soon_failures % MAX_EARLY_DEATHS + 1 if is_soon else 0
                if num_early_deaths == MAX_EARLY_DEATHS - 1 or num_soon_failures == MAX_EARLY_DEATHS:
                    self._give_up_memory()
                    if is_to_pause:  # tried on and on: of those that follow, none ends the supervisor
                        num_early_deaths = 0
            why = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
            if is_to_pause:
                kept = "what memory holds is kept; " if self.kept else ""
                _report(f"no daemon can start ({why}); {kept}one is tried every {REFUSED_RETRY_S:g} s")
                if self._is_to_end_within(REFUSED_RETRY_S):
                    return 0
            else:
                _report(f"the daemon ended ({why}); starting another one")

    def _is_to_end_within(self, seconds: float) -> bool:
        """Wait while there is no daemon; return whether a signal asks to end."""
        if select.select([self._signals], [], [], seconds)[0]:
            self._is_ending = {signal.SIGTERM, signal.SIGINT}.intersection(
                os.read(self._signals, 4096)
            ) != set()
        return self._is_ending

    def _become_daemon(self, channel: socket.socket, supervisor: int) -> int:
        """Run the daemon in this process, a child; return its exit code."""
        signal.set_wakeup_fd(-1)
        for number in (*_FORWARDED, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        os.setpgid(0, 0)  # Ctrl-C of a terminal reaches the supervisor alone, which passes it on
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != supervisor:
            return EXIT_FAILED  # it died between fork and prctl
        gc.disable()  # a tenth of what imports take; the daemon turns it on when it is ready
        from kvtier.appliance.cli import main
        from kvtier.tiers.memory.keeper import Keeper

        sys.argv = ["kvtier", *self._arguments]
        main(Keeper(channel, self.kept))
        return 0

    def _watch(self, channel: socket.socket) -> int:
        """Serve one daemon until it is dead; return its exit code, negative if a signal killed it."""
        poll = select.poll()
        poll.register(self._signals, select.POLLIN)
        poll.register(channel, select.POLLIN)
        while True:
            for descriptor, _ in poll.poll():
                if descriptor == channel.fileno():
                    if not self._answer(channel):
                        poll.unregister(channel)
                elif (code := self._handle_signals()) is not None:
                    return code

    def _handle_signals(self) -> int | None:
        """Pass signals on; return the daemon's exit code once it is dead."""
        for number in os.read(self._signals, 4096):
            if number != signal.SIGCHLD:
                self._is_ending |= number in _TO_END
                os.kill(self._child, number)  # dead or not, it is ours until it is waited for
        pid, status = os.waitpid(self._child, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if pid else None

    def _answer(self, channel: socket.socket) -> bool:
        """Answer one message; False at the end of the channel."""
        try:
            message, descriptors, _, _ = socket.recv_fds(channel, _MAX_MESSAGE_BYTES, 1)
            if not message:
                return False
            channel.send(self._obey(message.decode(), descriptors))
        except OSError:  # the daemon is dying: SIGCHLD says the rest
            return False
        return True

    def _obey(self, message: str, descriptors: list[int]) -> bytes:
        """Keep or drop memory; return the answer, which is empty of words when all is well."""
        verb, _, name = message.partition(" ")
        if verb == "ready":
            self._has_served = True
        elif verb == "drop" and name in self.kept:
            self._drop(name)
        elif verb == "keep" and descriptors and name not in self.kept:
            try:
                self.kept[name] = descriptors[0], mmap.mmap(descriptors[0], 0)
            except OSError as error:
                os.close(descriptors[0])
                return f"no {error.strerror}".encode()
        else:
            for descriptor in descriptors:
                os.close(descriptor)
            return b"no such request"
        return b"ok"

    def _drop(self, name: str) -> None:
        descriptor, mapping = self.kept.pop(name)
        mapping.close()
        os.close(descriptor)

    def _give_up_memory(self) -> None:
        """Forget all memory: it may be the reason why no daemon gets to serve, or goes on."""
        if not self.kept:
            return
        num_bytes = sum(len(mapping) for _, mapping in self.kept.values())
        _report(f"gives up what memory holds, {num_bytes >> 20} MiB")
        for name in list(self.kept):
            self._drop(name)


def _report(what: str) -> None:
    """Write a line to stderr. Without a reader there it is lost, and nothing else is."""
    with contextlib.suppress(OSError):
        os.write(2, f"kvtier: {what}\n".encode())


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    # Another process of this user could otherwise write the tiers through /proc.
    _prctl(_PR_SET_DUMPABLE, 0)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    sys.exit(Supervisor(sys.argv[1:]).run())
