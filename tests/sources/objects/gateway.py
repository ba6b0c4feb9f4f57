"""A real S3 gateway for tests: Ceph's, with a monitor and one OSD of its own, all on loopback.

Debian has it: INSTALL.
KVTIER_S3_ENDPOINT=http://host:port AWS_ACCESS_KEY_ID=… AWS_SECRET_ACCESS_KEY=…      for one that runs
"""

import base64
import datetime
import hashlib
import hmac
import itertools
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tests.ports import free_port

PROGRAMS = ("ceph-mon", "ceph-osd", "ceph-mgr", "radosgw", "ceph", "monmaptool", "radosgw-admin")
INSTALL = "apt-get install --no-install-recommends ceph-mon ceph-osd ceph-mgr radosgw ceph-common"
START_S = 240.0
NUM_ATTEMPTS = 3
CONFIGURATION = """
[global]
fsid = {fsid}
mon initial members = a
mon host = v1:127.0.0.1:{monitor}
auth cluster required = none
auth service required = none
auth client required = none
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 8
mon allow pool size one = true
osd crush chooseleaf type = 0
run dir = {folder}/run
log file = {folder}/run/$name.log
admin socket = {folder}/run/$name.asok
mon data = {folder}/mon
mon data avail crit = 1
osd data = {folder}/osd
mgr data = {folder}/mgr
osd objectstore = bluestore
bluestore block size = 2147483648
bluestore block create = true
osd memory target = 939524096
public addr = 127.0.0.1
cluster addr = 127.0.0.1
mgr initial modules =
[client.rgw]
rgw frontends = beast endpoint=127.0.0.1:{port} tcp_nodelay=1
rgw thread pool size = 16
"""


class Gateway(NamedTuple):
    """An S3 endpoint and its credentials."""

    endpoint: str
    key: str
    secret: str
    cluster: "Cluster | None" = None  # None: one that runs elsewhere

    def environment(self) -> dict[str, str]:
        """Return what tells a client of it."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": self.key,
            "AWS_SECRET_ACCESS_KEY": self.secret,
            "AWS_REGION": "us-east-1",
        }

    def make_bucket(self, name: str) -> None:
        """Create a bucket: obstore has no call for it."""
        self._put(f"/{name}", "", b"")

    def set_lifecycle(self, bucket: str, rules: dict[str, Any]) -> None:
        """Give a bucket the rules that `aws s3api put-bucket-lifecycle-configuration` takes."""
        rows = "".join(
            f"<Rule><ID>{one['ID']}</ID><Status>{one['Status']}</Status>"
            f"<Filter><Prefix>{one['Filter']['Prefix']}</Prefix></Filter>"
            f"<Expiration><Days>{one['Expiration']['Days']}</Days></Expiration></Rule>"
            for one in rules["Rules"]
        )
        body = f"<LifecycleConfiguration>{rows}</LifecycleConfiguration>"
        self._put(f"/{bucket}", "lifecycle=", body.encode())

    def _put(self, path: str, query: str, body: bytes) -> None:
        """Send one request, signed (AWS4)."""
        now = datetime.datetime.now(datetime.UTC)
        day, stamp = now.strftime("%Y%m%d"), now.strftime("%Y%m%dT%H%M%SZ")
        host, hashed = self.endpoint.partition("//")[2], hashlib.sha256(body).hexdigest()
        signed = "host;x-amz-content-sha256;x-amz-date"
        headers = f"host:{host}\nx-amz-content-sha256:{hashed}\nx-amz-date:{stamp}\n"
        asked = f"PUT\n{path}\n{query}\n{headers}\n{signed}\n{hashed}"
        scope = f"{day}/us-east-1/s3/aws4_request"
        text = f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{hashlib.sha256(asked.encode()).hexdigest()}"
        key = f"AWS4{self.secret}".encode()
        for part in (*scope.split("/"), text):
            key = hmac.new(key, part.encode(), hashlib.sha256).digest()
        request = urllib.request.Request(f"{self.endpoint}{path}?{query}", data=body, method="PUT")
        request.add_header("x-amz-date", stamp)
        request.add_header("x-amz-content-sha256", hashed)
        request.add_header("Content-MD5", base64.b64encode(hashlib.md5(body).digest()).decode())
        credential = f"{self.key}/{scope}, SignedHeaders={signed}, Signature={key.hex()}"
        request.add_header("Authorization", f"AWS4-HMAC-SHA256 Credential={credential}")
        urllib.request.urlopen(request, timeout=60).read()


def why_not() -> str:
    """Return why there is no gateway here, and how to have one; empty when there is one."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if os.environ.get("KVTIER_S3_ENDPOINT") or not missing:
        return ""
    return (
        f"no S3 gateway: {', '.join(missing)} missing; Debian has Ceph's (`{INSTALL}`), or "
        "name one that runs with KVTIER_S3_ENDPOINT, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
    )


@contextmanager
def gateway(folder: Path, more: str = "") -> Iterator[Gateway]:
    """Yield the gateway that the environment names, or one that is started for the time of the block.

    `more` are lines for the configuration of the latter."""
    if endpoint := os.environ.get("KVTIER_S3_ENDPOINT"):
        yield Gateway(endpoint, os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"])
        return
    cluster, running = _started(folder, more)
    try:
        yield running
    finally:
        cluster.stop()


def _started(folder: Path, more: str) -> tuple["Cluster", Gateway]:
    """Start a cluster; two that start at the same time may take each other's ports, so it is tried again."""
    for attempt in itertools.count():
        cluster = Cluster(folder / str(attempt), more)
        try:
            return cluster, cluster.start()
        except AssertionError:
            cluster.stop()
            if attempt == NUM_ATTEMPTS - 1:
                raise
    raise AssertionError("unreachable")


class Cluster:
    """Ceph's daemons, in a folder."""

    def __init__(self, folder: Path, more: str) -> None:
        self.folder, self.more = folder, more
        self.port, self.monitor = free_port(), free_port()
        self.processes: list[subprocess.Popen[bytes]] = []
        self._lock = threading.Lock()  # of the gateway's process

    def start(self) -> Gateway:
        """Start the four daemons, each when the one before it answers."""
        fsid = str(uuid.uuid4())
        for name in ("run", "mon", "mgr", "osd"):
            (self.folder / name).mkdir(parents=True)
        text = CONFIGURATION.format(fsid=fsid, folder=self.folder, port=self.port, monitor=self.monitor)
        (self.folder / "ceph.conf").write_text(text + self.more)
        self._run(
            *("monmaptool", "--create", "--addv", "a", f"[v1:127.0.0.1:{self.monitor}]", "--fsid", fsid),
            "monmap",
        )
        self._run("ceph-mon", "-c", "ceph.conf", "--mkfs", "-i", "a", "--monmap", "monmap")
        self._begin("ceph-mon", "-i", "a")
        self._wait("the monitor", lambda: self._asks("mon", "stat"))
        self._begin("ceph-mgr", "-i", "x")
        osd = str(uuid.uuid4())
        number = self._run("ceph", "-c", "ceph.conf", "osd", "new", osd).strip()
        self._run("ceph-osd", "-c", "ceph.conf", "-i", number, "--mkfs", "--osd-uuid", osd)
        self._begin("ceph-osd", "-i", number)
        self._wait("the OSD", lambda: "1 up" in self._asks("osd", "stat"))
        self._begin("radosgw", "-n", "client.rgw")
        self._wait("the gateway", self._answers)
        user = ("--uid=kv", "--display-name=kv", "--access-key=key", "--secret-key=secret")
        self._run("radosgw-admin", "-c", "ceph.conf", "user", "create", *user)
        return Gateway(f"http://127.0.0.1:{self.port}", "key", "secret", self)

    def kill_gateway(self) -> None:
        """End the gateway at once, with whatever it is doing; the disk daemon goes on."""
        with self._lock:
            self.processes[-1].kill()
            self.processes[-1].wait()

    def start_gateway(self) -> None:
        """Start the gateway again, and wait until it answers."""
        with self._lock:  # another thread may be waiting for the one that it killed
            if self.processes[-1].poll() is not None:
                self.processes.pop()
                self._begin("radosgw", "-n", "client.rgw")
        self._wait("the gateway", self._answers)

    def signal_gateway(self, which: signal.Signals) -> None:
        """Send the gateway a signal."""
        self.processes[-1].send_signal(which)

    def admin(self, *words: str) -> None:
        """Run radosgw-admin."""
        self._run("radosgw-admin", "-c", "ceph.conf", *words)

    def stop(self) -> None:
        """End the daemons and remove what they stored."""
        for process in reversed(self.processes):
            process.kill()
            process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _begin(self, program: str, *arguments: str) -> None:
        with (self.folder / "run" / f"{program}.out").open("wb") as said:
            command = [program, "-c", "ceph.conf", *arguments, "-f"]
            self.processes.append(subprocess.Popen(command, cwd=self.folder, stdout=said, stderr=said))

    def _run(self, *command: str) -> str:
        done = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, timeout=START_S)
        assert done.returncode == 0, f"{' '.join(command)}:\n{done.stderr[-2000:]}"
        return done.stdout

    def _asks(self, *words: str) -> str:
        command = ["ceph", "-c", "ceph.conf", "--connect-timeout", "5", *words]
        done = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, timeout=START_S)
        return done.stdout if done.returncode == 0 else ""

    def _answers(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def _wait(self, what: str, is_ready: Callable[[], object]) -> None:
        deadline = time.monotonic() + START_S
        while not is_ready():
            for process in self.processes:
                assert process.poll() is None, self._said(process, f"ended while waiting for {what}")
            assert time.monotonic() < deadline, f"{what} did not come up; see {self.folder}/run"
            time.sleep(0.2)

    def _said(self, process: subprocess.Popen[bytes], what: str) -> str:
        """Return what a daemon printed last: its folder does not outlive the tests."""
        program = str(process.args[0])  # type: ignore[index]
        last = (self.folder / "run" / f"{program}.out").read_text(errors="replace")[-3000:]
        return f"{program} {what} with {process.returncode}:\n{last}"
