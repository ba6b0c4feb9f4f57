"""Commands in pages: reading them out of Markdown, and running a page as a newcomer would.

A block of `sh` is run, unless the line before it says why not; a block of `text` that follows says what must
be seen, `…` standing for anything:

    <!-- not run: needs Kubernetes -->        <!-- fails: 2 -->      (the status it must end with)

Each page has an empty folder, a socket and a port of its own. A test framework for documents was rejected:
those that exist compare whole outputs, and ours have times and addresses in them.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.ports import free_port

BLOCK = re.compile(r"(?:<!-- (not run|fails): ([^\n]+?) -->\n)?^```(\w+)\n(.*?)^```$", re.M | re.S)
HTTP, GRPC = "127.0.0.1:9464", "127.0.0.1:50051"  # a newcomer has ports of its own instead
COMMAND_S = 180.0


@dataclass
class Command:
    """One block of a page. `why_not` is empty when it is to be run."""

    text: str
    why_not: str = ""
    status: int = 0
    shown: list[str] = field(default_factory=list)


def commands_of(page: str) -> Iterator[Command]:
    """Yield the blocks of a page, each with what must be seen."""
    command: Command | None = None
    for mark, words, language, text in BLOCK.findall(page):
        if language == "text" and command is not None:
            command.shown = text.splitlines()
        if language in ("sh", "console"):
            if command is not None:
                yield command
            command = Command(text)
            if mark == "not run":
                command.why_not = words
            elif mark:
                command.status = int(words)
    if command is not None:
        yield command


def is_seen(line: str, output: str) -> bool:
    """Whether a line of what must be seen is in an output; runs of blanks count as one."""
    parts = [re.escape(" ".join(part.split())) for part in line.split("…")]
    return re.search(".*".join(part.replace(r"\ ", " ") for part in parts), _squeezed(output)) is not None


def _squeezed(text: str) -> str:
    return "\n".join(" ".join(line.split()) for line in text.splitlines())


class Newcomer:
    """Somebody in an empty folder. `close` ends whatever was started.

    `programs` holds the `kvtier` and `python` to run, those of this interpreter unless told otherwise. An
    installed kvtier is then the only one that they find.
    """

    def __init__(self, folder: Path, programs: Path | None = None) -> None:
        self.folder = folder
        self._socket = folder / "run" / "kvtier.sock"
        self._ports = {GRPC: f"127.0.0.1:{free_port()}", HTTP: f"127.0.0.1:{free_port()}"}
        target = f"unix://{self._socket}"
        self._environment = {
            "PATH": f"{programs or Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "HOME": str(folder),
            "COLUMNS": "120",
            "LANG": "C.UTF-8",
            **({} if programs else {"PYTHONPATH": os.pathsep.join(sys.path)}),
            "KVTIER_LISTEN": target,
            "KVTIER_TARGET": target,
            "KVTIER_OBSERVE__HTTP": self._ports[HTTP],
        }
        self._groups: list[int] = []

    def run(self, command: Command) -> tuple[int, str]:
        """Run a block; return its status and all that was printed. Waits for daemons it starts or ends."""
        text = f"set -euo pipefail\n{self.named(command.text)}"
        # A file for each block: a daemon goes on writing into that of the block it was started in.
        printed = self.folder / f"printed-{len(self._groups)}"
        with printed.open("wb") as out:
            shell = subprocess.Popen(
                ["bash", "-c", text],
                cwd=self.folder,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
            self._groups.append(shell.pid)
            status = shell.wait(COMMAND_S)
        if status == 0 and "kvtier serve" in command.text:
            self._wait(is_up=True)
        if status == 0 and "--exit" in command.text:
            self._wait(is_up=False)
        return status, printed.read_text()

    def named(self, text: str) -> str:
        """Return `text` of a page with this newcomer's ports."""
        for written, own in self._ports.items():
            text = text.replace(written, own)
        return text

    def close(self) -> None:
        """End what is left."""
        for group in self._groups:
            try:
                os.killpg(group, signal.SIGKILL)
            except ProcessLookupError:
                continue

    def _wait(self, *, is_up: bool) -> None:
        deadline_at, pause = time.monotonic() + COMMAND_S, threading.Event()
        path = f"{self._socket}.local" if is_up else str(self._socket)
        while _listens(path) != is_up:
            assert time.monotonic() < deadline_at, f"the daemon is not {'up' if is_up else 'gone'}"
            pause.wait(0.02)


def _listens(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(path) == 0
