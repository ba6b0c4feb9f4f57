"""`python -m tests.sources.directories.installing PACKAGE…`: installs the servers that are missing, where
root may; says the command otherwise. A refused install is no failure: the tests skip what is not there.

No service is started: the tests run servers of their own, on loopback."""

import os
import shutil
import subprocess
import sys

from .servers import ETCD, REDIS


def main(packages: list[str]) -> None:
    """Install the packages unless the programs are there."""
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
