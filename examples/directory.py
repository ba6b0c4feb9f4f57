"""A directory in which hosts find each other: Debian's etcd or Redis, as a process on a host of its own."""

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from .network import NetworkHost

PROGRAMS = {"etcd": "etcd", "redis": "redis-server"}


@contextmanager
def directory(kind: str, place: NetworkHost) -> Iterator[str]:
    """Run a directory, `etcd` or `redis`, until the end.

    Yields `peers.directory.url`, empty where its program is not installed. It may not answer yet: hosts ask
    again every second."""
    if shutil.which(PROGRAMS[kind]) is None:
        yield ""
        return
    port = 2379 if kind == "etcd" else 6379
    with tempfile.TemporaryDirectory(prefix="kvtier-directory-") as folder:
        url = f"http://{place.address}:{port}"
        words = {
            "etcd": ["--data-dir", folder, "--listen-client-urls", url, "--advertise-client-urls", url],
            "redis": ["--bind", place.address, "--protected-mode", "no", "--save", "", "--dir", folder],
        }
        command = [*place.prefix, PROGRAMS[kind], *words[kind]]
        quiet = subprocess.DEVNULL
        with subprocess.Popen(command, stdout=quiet, stderr=quiet, start_new_session=True) as process:
            try:
                yield f"{kind}://{place.address}:{port}"
            finally:
                process.kill()
