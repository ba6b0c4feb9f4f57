"""Commands in pages: reading them out of Markdown, and running a page as its reader would.

A block of `sh` is run, unless the line before it says why not; a block of `text` that follows says what must
be seen, `…` standing for anything:

    <!-- not run: needs Kubernetes -->        <!-- fails: 2 -->      (the status it must end with)

All blocks of a page run in one shell, in order, in namespaces of its own: an empty folder, an empty /run, a
loopback without other listeners. So addresses are those of the page, and no variable is set that the page
does not set. A test framework for documents was rejected: those that exist compare whole outputs, and ours
have times and addresses in them.
"""

import os
import re
import selectors
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

BLOCK = re.compile(r"(?:<!-- (not run|fails): ([^\n]+?) -->\n)?^```(\w+)\n(.*?)^```$", re.M | re.S)
HTTP = "127.0.0.1:9464"  # of metrics and page, as pages write it
COMMAND_S = 180.0
STACKS_S = 2.0  # for processes that hang to say where
#: Enters namespaces; another user than root becomes root in one of users.
UNSHARE = (
    "unshare",
    *(() if os.geteuid() == 0 else ("--user", "--map-root-user")),
    *("--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"),
)
#: What is done in them before the first block; fd 9 then takes a line for each block that has ended.
PREPARE = """
mount -t tmpfs -o mode=755 tmpfs /run
{python} -c 'import fcntl, socket, struct
fcntl.ioctl(socket.socket(), 0x8914, struct.pack("16sH14x", b"lo", 1))'  # SIOCSIFFLAGS: IFF_UP
exec 9>&1
set -uE -o pipefail
"""
#: Runs one block in the shell itself; its status is that of the first command that failed.
RUN = """
page_status=0
trap 'page_problem=$?; [ $page_status != 0 ] || page_status=$page_problem' ERR
source {block} </dev/null >{printed} 2>&1
trap - ERR
echo $page_status >&9
"""


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


def can_isolate() -> bool:
    """Whether this user may make the namespaces that a page runs in."""
    try:
        return subprocess.run([*UNSHARE, "true"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


class PageSession:
    """One shell in an empty folder, for all blocks of a page. `close` ends it and all that it started.

    `programs` holds the `kvtier` and `python` to run, those of this interpreter unless told otherwise. An
    installed kvtier is then the only one that they find.
    """

    def __init__(self, folder: Path, programs: Path | None = None) -> None:
        self._folder = folder
        self._num_blocks = 0
        self._shell = subprocess.Popen(
            [*UNSHARE, "bash", "--norc", "--noprofile"],
            cwd=folder,
            env={
                "PATH": f"{programs or Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
                "HOME": str(folder),
                "COLUMNS": "120",
                "LANG": "C.UTF-8",
                "PYTHONFAULTHANDLER": "1",
                **({} if programs else {"PYTHONPATH": os.pathsep.join(sys.path)}),
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            text=True,
        )
        self._send(PREPARE.format(python=shlex.quote(sys.executable)))

    def run(self, command: Command) -> tuple[int, str]:
        """Run a block; return its status and what was printed until it ended. A daemon goes on printing to
        where the block that started it printed. Raises TimeoutError."""
        block, printed = (
            self._folder / f"{name}-{self._num_blocks}.txt" for name in (".page-block", ".page-printed")
        )
        self._num_blocks += 1
        block.write_text(command.text)
        self._send(RUN.format(block=shlex.quote(str(block)), printed=shlex.quote(str(printed))))
        assert self._shell.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._shell.stdout, selectors.EVENT_READ)
            if not selector.select(COMMAND_S):
                self._show_stacks()
                raise TimeoutError(f"no end after {COMMAND_S} s:\n{command.text}\n{printed.read_text()}")
        line = self._shell.stdout.readline()
        status = int(line) if line else self._shell.wait()  # a block may end the shell
        return status, printed.read_text()

    def close(self) -> None:
        """End the shell and, with its namespace, every process in it."""
        os.killpg(self._shell.pid, signal.SIGKILL)
        self._shell.communicate()

    def _show_stacks(self) -> None:
        """Let every Python process of the page print where it stands, to what its block printed to."""
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                session = (folder / "stat").read_text().rpartition(")")[2].split()[3]
                if int(session) == self._shell.pid and b"python" in (folder / "cmdline").read_bytes():
                    os.kill(int(folder.name), signal.SIGABRT)
            except (FileNotFoundError, ProcessLookupError):
                continue
        threading.Event().wait(STACKS_S)

    def _send(self, text: str) -> None:
        assert self._shell.stdin is not None
        self._shell.stdin.write(text)
        self._shell.stdin.flush()
