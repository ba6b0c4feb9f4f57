"""`python -m tests.sources.directories.installing PACKAGE…`: installs the servers that are missing, where
root may; says the command otherwise. A refused install is no failure: the tests skip what is not there.

`… --valkey FOLDER` unpacks Debian's Valkey, which older releases have in their backports, below FOLDER: no
root is needed, and nothing of the system changes.

No service is started: the tests run servers of their own, on loopback."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.debian import unpack

from .servers import ETCD, REDIS

VALKEY = ("valkey-server", "valkey-tools")


def main(packages: list[str]) -> None:
    """Install the packages unless the programs are there."""
    if packages[0] == "--valkey":
        folder = Path(packages[1]).resolve()
        is_there = (folder / "usr/bin/valkey-server").exists()
        if not is_there and (reason := unpack(folder, VALKEY, ("", "-backports"))):
            print(f"what needs Valkey is not run: {reason}")
        return
    command = ["apt-get", "install", "--yes", "--no-install-recommends", *packages]
    if REDIS and ETCD and (shutil.which("redis-sentinel") or shutil.which("valkey-sentinel")):
        return
    if os.geteuid() or not shutil.which("apt-get"):
        print(f"servers are missing; as root: {' '.join(command)}")
        return
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
    for words in (["apt-get", "update", "--quiet"], command):
        if subprocess.run(words, env=environment, stdout=subprocess.DEVNULL).returncode:
            print(f"could not install; what needs the servers is skipped: {' '.join(words)}")
            return


if __name__ == "__main__":
    main(sys.argv[1:])
