"""The process that holds NIXL: native code that any host of the fleet can make write to any of its memory.

Started by nixl_process.py as a script, so it imports nothing of kvtier. It has two memories that it shares
with its parent, and nothing else to lose. Other hosts are told of the *landing* one and write into it; out of
the *outgoing* one, of which they are not told, it writes into theirs. It never reads from another host. When
the parent is gone its socket says so.

NIXL moves bytes only while it is polled, here at least; its own thread for that takes half a core for ever.
So this process polls while a write of its own runs, or its parent says that one is expected.
"""

import ctypes
import importlib.metadata
import json
import mmap
import os
import resource
import select
import signal
import socket
import sys
import time
from typing import Any

PACKAGE, NIXL_VERSION = "nixl-cu12", "1.5.1"
MAX_MESSAGE_BYTES = 160 << 10
PR_SET_NO_NEW_PRIVS = 38
MAX_HOSTS = 64  # of which the memory is known
REST_S = 50e-6  # between two polls: it polls until nothing more has come
EXPECT_S = 30.0  # after which a write is not expected any more, whatever the parent forgot


class Destinations:
    """Other hosts' landing memory, by the metadata that describes it."""

    def __init__(self, agent: Any) -> None:
        self._agent = agent
        self._names: dict[str, str] = {}

    def name_of(self, metadata: str) -> str:
        """Return the name of a host to NIXL. Raises what NIXL raises; ValueError where two have it."""
        if metadata not in self._names:
            if len(self._names) >= MAX_HOSTS:
                self.forget(next(iter(self._names)))
            name = self._agent.add_remote_agent(bytes.fromhex(metadata))
            name = name.decode() if isinstance(name, bytes) else name
            if name in self._names.values():  # by now it may mean either
                for known in [one for one, other in self._names.items() if other == name]:
                    self.forget(known)
                raise ValueError("two hosts have the same name")
            self._names[metadata] = name
        return self._names[metadata]

    def forget(self, metadata: str) -> None:
        """Close the connection to a host."""
        name = self._names.pop(metadata, None)
        if name is not None:
            self._agent.remove_remote_agent(name)


class Child:
    """Carries out what the parent asks, a message of JSON each; an answer has the number of its question."""

    def __init__(self, control: socket.socket, agent: Any, landing: int, outgoing: int) -> None:
        self._control = control
        self._agent = agent
        self._hosts = Destinations(agent)
        self._addresses = landing, outgoing
        self._writes: dict[int, tuple[Any, str]] = {}  # handle and metadata
        self._expected: dict[int, float] = {}  # until when

    def run(self) -> None:
        """Serve until the parent is gone."""
        while True:
            is_busy = bool(self._writes or self._expected)
            if select.select([self._control], (), (), REST_S if is_busy else None)[0]:
                message = self._control.recv(MAX_MESSAGE_BYTES)
                if not message:
                    return
                self._take(json.loads(message))
            self._agent.get_new_notifs()
            self._look()

    def _take(self, message: dict[str, Any]) -> None:
        number = message["number"]
        if message["do"] == "expect":
            self._expected[number] = time.monotonic() + EXPECT_S
        elif message["do"] == "end":
            self._expected.pop(number, None)
            if number in self._writes:
                self._end(number, "failed: given up")
        else:
            try:
                self._write(number, **message["write"])
            except Exception as failure:  # NIXL's own have no common class
                if number in self._writes:
                    self._end(number, f"failed {failure}")
                else:
                    self._hosts.forget(message["write"]["metadata"])
                    self._say(number, f"refused {failure}")

    def _write(self, number: int, metadata: str, start: int, address: int, length: int) -> None:
        name = self._hosts.name_of(metadata)
        here = self._agent.get_xfer_descs([(self._addresses[1] + start, length, 0)], "DRAM")
        there = self._agent.get_xfer_descs([(address, length, 0)], "DRAM")  # NIXL looks into the metadata
        handle = self._agent.initialize_xfer("WRITE", here, there, name)
        self._writes[number] = handle, metadata
        self._agent.transfer(handle)

    def _look(self) -> None:
        """Answer what has ended."""
        now = time.monotonic()
        self._expected = {number: until for number, until in self._expected.items() if until > now}
        for number, (handle, _) in list(self._writes.items()):
            try:
                state = self._agent.check_xfer_state(handle)
            except Exception as failure:
                self._end(number, f"failed {failure}")
                continue
            if state != "PROC":
                self._end(number, "" if state == "DONE" else f"failed {state}")

    def _end(self, number: int, problem: str) -> None:
        handle, metadata = self._writes.pop(number)
        try:
            self._agent.release_xfer_handle(handle)
        except Exception as failure:
            problem = problem or f"failed {failure}"
        if problem:
            self._hosts.forget(metadata)
        self._say(number, problem)

    def _say(self, number: int, problem: str) -> None:
        self._control.send(json.dumps({"number": number, "problem": problem[:1000]}).encode())


def mapped(descriptor: int) -> tuple[mmap.mmap, int, int]:
    """Return a mapping of all of a memory, its address and its length."""
    memory = mmap.mmap(descriptor, 0)
    return memory, ctypes.addressof(ctypes.c_char.from_buffer(memory)), len(memory)


def main(name: str, control: socket.socket, landing: int, outgoing: int) -> None:
    """Open NIXL, say where others may write, and serve."""
    # SIGTERM reaches every process of a service, and the parent's end is this one's.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    ctypes.CDLL(None).prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    import nixl_cu12._api as api  # type: ignore[import-not-found,unused-ignore]

    agent = api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=False, backends=[]))
    agent.create_backend("UCX", {"ucx_error_handling_mode": "peer"})
    memories = [mapped(one) for one in (landing, outgoing)]
    told, _ = (agent.register_memory([(at, length, 0, "")], "DRAM") for _, at, length in memories)
    metadata = agent.get_partial_agent_metadata(told, True, ["UCX"])
    version = importlib.metadata.version(PACKAGE)
    hello = {"version": version, "metadata": metadata.hex(), "address": memories[0][1]}
    control.send(json.dumps(hello).encode())
    try:
        Child(control, agent, memories[0][1], memories[1][1]).run()
    finally:
        os._exit(0)  # NIXL's own end may crash, and nothing here is worth waiting for


if __name__ == "__main__":
    main(sys.argv[1], socket.socket(fileno=int(sys.argv[2])), int(sys.argv[3]), int(sys.argv[4]))
