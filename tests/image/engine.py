"""The image under podman, in a store of its own: loads what `make image` wrote, mounts it, and runs its pods
as Helm renders them.

podman translates the manifest by itself (`play kube`): user, capabilities, seccomp profile, read-only root,
memory limit, volumes, init containers. It is no kubelet: the tests run probes and hooks as the manifest says,
fsGroup is ignored, and the pod has the network of the host.
"""

import json
import os
import resource
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

PROGRAMS = ("podman", "runc", "catatonit")
COMMAND_S = 240.0
#: Not for podman: probes (it would run a `curl` inside), hooks, and ports of a pod in the host's network.
NOT_PODMANS = ("startupProbe", "readinessProbe", "livenessProbe", "lifecycle", "ports")


def what_is_missing() -> str:
    """Return one line that says what to do first, empty when nothing is missing."""
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    if os.geteuid() != 0 or absent:
        return f"make test-image needs root{' and: apt-get install ' + ' '.join(absent) if absent else ''}"
    return ""


class Engine:
    """podman with its images and containers below `folder`. `close` removes all of it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        # podman asks for a million of each, which a machine that is itself confined may not give. The lower
        # of both: podman 4 takes the limit of files for its own limit of processes.
        limits = {resource.getrlimit(which)[1] for which in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC)}
        self.most = most = min(limits - {resource.RLIM_INFINITY}, default=1 << 20)
        config = folder / "containers.conf"
        # runc: crun of Debian 12 refuses hosts with both versions of cgroups.
        config.write_text(
            f'[containers]\ndefault_ulimits = ["nofile={most}:{most}", "nproc={most}:{most}"]\n'
            '[engine]\nruntime = "runc"\n'
        )
        self._environment = {**os.environ, "CONTAINERS_CONF": str(config)}
        self._command = ["podman", "--root", str(folder / "root"), "--runroot", str(folder / "runroot")]

    def do(self, *arguments: str, check: bool = True, stdin: str = "") -> subprocess.CompletedProcess[str]:
        """Run a command of podman. Fails when it does, unless `check` is false."""
        done = subprocess.run(
            [*self._command, *arguments],
            input=stdin,
            env=self._environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=COMMAND_S,
        )
        assert not check or done.returncode == 0, f"{arguments}: {done.stdout}{done.stderr}"
        return done

    def as_a_program(self) -> str:
        """Return a shell script that is this podman."""
        config = self._environment["CONTAINERS_CONF"]
        return f'#!/bin/sh\nCONTAINERS_CONF={shlex.quote(config)} exec {shlex.join(self._command)} "$@"\n'

    def inspect(self, kind: str, name: str) -> dict[str, Any]:
        """Return what podman says of an image or container."""
        [found] = json.loads(self.do(kind, "inspect", name).stdout)
        assert isinstance(found, dict)
        return found

    @contextmanager
    def mounted(self, image: str) -> Iterator[Path]:
        """Mount the file system of an image, read-only."""
        yield Path(self.do("image", "mount", image).stdout.strip())
        self.do("image", "unmount", image)

    def play(self, *manifests: dict[str, Any]) -> None:
        """Start manifests as `kubectl apply` would, once their init containers ended."""
        text = yaml.safe_dump_all(manifests)
        self.do("play", "kube", "--network", "host", "-", stdin=text)

    def close(self) -> None:
        """Remove containers, volumes and images, whatever became of the tests."""
        for arguments in (
            ("pod", "rm", "--all", "--force", "--time", "0"),
            ("rm", "--all", "--force", "--time", "0"),
            ("image", "unmount", "--all", "--force"),
            ("volume", "rm", "--all", "--force"),
            ("rmi", "--all", "--force"),
        ):
            self.do(*arguments, check=False)
        for mount in ("root/overlay", "root"):
            subprocess.run(["umount", str(self._folder / mount)], capture_output=True, check=False)
        shutil.rmtree(self._folder, ignore_errors=True)


def pod_of(manifest: dict[str, Any], name: str) -> dict[str, Any]:
    """Return one node's pod of a DaemonSet, or a Pod, as podman plays it."""
    spec = manifest["spec"]["template"]["spec"] if manifest["kind"] == "DaemonSet" else manifest["spec"]
    containers = [
        {key: value for key, value in container.items() if key not in NOT_PODMANS}
        for container in spec["containers"]
    ]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {**spec, "containers": containers, "restartPolicy": "Never"},
    }
