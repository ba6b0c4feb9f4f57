"""Runs a rendered pod's containers without Kubernetes: own mounts and processes, the user, no capability, and
a root file system that is read-only, as the manifest says. What is not imitated: network, seccomp, limits.

The root is a tmpfs with this machine's programs in it; volumes are folders that stand for the node's.

Nothing outlives its test. A container is killed by its process 1, with which the kernel ends everything in
its PID namespace; `close` does that, and whoever makes containers closes all of them, started well or not.
Should this process be killed itself, the kernel kills `unshare`, and then process 1: both ask for that signal
(PDEATHSIG), the latter after it became its user, because that takes the request back. (So it takes back
unshare's --kill-child: who kills `unshare` alone leaves a daemon.)
"""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from shlex import join, quote
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ("/usr", "/bin", "/sbin", "/lib", "/lib64")
LIBRARIES = tuple(dict.fromkeys((sys.base_prefix, sys.prefix, str(ROOT))))
STOP_S = 60.0


def why_not() -> str:
    """Return why no container can be run here, empty when it can."""
    if os.geteuid() != 0:
        return "only root makes mounts and changes users"
    tried = subprocess.run(
        ["unshare", "--mount", "--pid", "--fork", "true"], capture_output=True, check=False
    )
    return "" if tried.returncode == 0 else "this kernel or container makes no namespaces"


class Container:
    """One container of `pod`; `volumes` are the folders that its volumes stand for. `close` kills what runs;
    a context manager does it at its end."""

    def __init__(
        self, container: dict[str, Any], pod: dict[str, Any], volumes: dict[str, Path], log: Path
    ) -> None:
        self._container = container
        self._pod = pod
        self._volumes = volumes
        self.log = log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start its command; the output goes to `log`."""
        command = [*self._container["command"], *self._container.get("args", ())]
        root = self.log.with_suffix(".root")
        root.mkdir()
        lines = [*self._mounts(root), f"exec chroot {quote(str(root))} {join([*self._user(), *command])}"]
        dying_with_us = ["setpriv", "--pdeathsig", "KILL"]
        unshare = [
            *dying_with_us,
            "unshare",
            "--mount",
            "--pid",
            "--fork",
            "--kill-child",
            "sh",
            "-ec",
            "\n".join(lines),
        ]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(unshare, stdout=log, stderr=log, env=self._environment())

    def run(self) -> str:
        """Run it to its end; return its output. Fails when it does."""
        self.start()
        status, output = self.wait(), self.log.read_text()
        assert status == 0, output
        return output

    def wait(self) -> int:
        """Wait for its end; return its exit status."""
        assert self._process is not None
        return self._process.wait(STOP_S)

    def has_ended(self) -> bool:
        """Whether it ended by itself."""
        return self._process is None or self._process.poll() is not None

    @property
    def pid(self) -> int:
        """The process that is number 1 in the container, as it is called outside."""
        [first] = self._first()
        return first

    def execute(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        """Run another command inside, as `kubectl exec` and lifecycle hooks do."""
        enter = ["nsenter", "--target", str(self.pid), "--mount", "--pid", "--root", *self._user(), *command]
        return subprocess.run(
            enter, capture_output=True, text=True, check=False, env=self._environment(), timeout=STOP_S
        )

    def close(self) -> None:
        """Kill everything in it; when this returns it is gone. Idempotent."""
        if self._process is None or self._process.poll() is not None:
            return
        for number in self._first() or [self._process.pid]:  # that one, when it has not forked yet
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        self._process.wait(STOP_S)  # for process 1, too: unshare waits for it

    def __enter__(self) -> "Container":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------------------------- private

    def _first(self) -> list[int]:
        """Return process 1 of the container, if it was begun."""
        assert self._process is not None
        number = self._process.pid
        try:
            return [int(word) for word in Path(f"/proc/{number}/task/{number}/children").read_text().split()]
        except FileNotFoundError:
            return []

    def _environment(self) -> dict[str, str]:
        said = {entry["name"]: entry["value"] for entry in self._container.get("env", ())}
        return {
            "PATH": f"{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin",
            "PYTHONDONTWRITEBYTECODE": "1",
            **said,
        }

    def _user(self) -> list[str]:
        """Return the command that becomes the container's user, without any capability."""
        security = {**self._pod["securityContext"], **self._container["securityContext"]}
        user, group = security["runAsUser"], security["runAsGroup"]
        assert security["capabilities"] == {"drop": ["ALL"]}
        return [
            *("setpriv", f"--reuid={user}", f"--regid={group}", "--clear-groups"),
            *("--no-new-privs", "--bounding-set=-all", "--inh-caps=-all"),
            *("--pdeathsig", "KILL", "--"),
        ]

    def _mounts(self, root: Path) -> list[str]:
        """Return the shell lines that make the container's root at `root`.

        What this machine lends comes after the volumes where it lies below one, as a clone in /tmp does.
        """
        volumes = {mount["mountPath"]: mount for mount in self._container["volumeMounts"]}
        below = [path for path in LIBRARIES if any(path.startswith(f"{inside}/") for inside in volumes)]
        lines = ["mount --make-rprivate /", f"mount -t tmpfs -o mode=755 tmpfs {quote(str(root))}"]
        for path in (*PROGRAMS, *(path for path in LIBRARIES if path not in below), "/dev"):
            lines += _lend(path, f"{root}{path}")
        proc, etc = quote(f"{root}/proc"), quote(f"{root}/etc")
        lines += [f"mkdir -p {proc} {etc}", f"mount -t proc proc {proc}"]
        lines.append(f"cp /etc/ld.so.cache /etc/passwd {etc}")
        for path, mount in volumes.items():
            folder, inside = quote(str(self._volumes[mount["name"]])), quote(f"{root}{path}")
            lines += [f"mkdir -p {inside}", f"mount --bind {folder} {inside}"]
            if mount.get("readOnly"):
                lines.append(f"mount -o remount,bind,ro {inside}")
        for path in below:
            lines += _lend(path, f"{root}{path}")
        return [*lines, f"mount -o remount,ro {quote(str(root))}", f"cd {quote(str(root))}"]


def _lend(path: str, place: str) -> list[str]:
    """Return the shell lines that show `path` of this machine at `place`, read-only."""
    if Path(path).is_symlink():
        return [f"ln -s {quote(os.readlink(path))} {quote(place)}"]
    if not Path(path).exists():
        return []
    lines = [f"mkdir -p {quote(place)}", f"mount --rbind {quote(path)} {quote(place)}"]
    return lines if path == "/dev" else [*lines, f"mount -o remount,bind,ro {quote(place)}"]
