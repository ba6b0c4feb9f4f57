"""`python -m tests.sources.directories.installing PACKAGE…`: installs the servers that are missing, where
root may; says the command otherwise. A refused install is no failure: the tests skip what is not there.

`… --valkey FOLDER` unpacks Debian's Valkey, which older releases have in their backports, below FOLDER: no
root is needed, and nothing of the system changes.

No service is started: the tests run servers of their own, on loopback."""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

from .servers import ETCD, REDIS

VALKEY = ("valkey-server", "valkey-tools")


def main(packages: list[str]) -> None:
    """Install the packages unless the programs are there."""
    if packages[0] == "--valkey":
        unpack(Path(packages[1]).resolve())
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


def unpack(folder: Path) -> None:
    """Unpack VALKEY into `folder`, with lists of packages of its own. Idempotent.

    Says why not where it cannot.
    """
    if (folder / "usr/bin/valkey-server").exists():
        return
    if not shutil.which("apt-get"):
        print("no apt-get; what needs Valkey is not run")
        return
    state, sources = folder / "apt", folder / "apt" / "sources.list"
    for name in ("lists/partial", "cache/archives/partial"):
        (state / name).mkdir(parents=True, exist_ok=True)
    release = platform.freedesktop_os_release().get("VERSION_CODENAME", "")
    targets = ["apt-get", "indextargets", "--format", "$(REPO_URI) $(CODENAME) $(COMPONENT)"]
    known = subprocess.run(targets, check=True, capture_output=True, text=True).stdout.splitlines()
    urls = sorted({line.split()[0] for line in known if line.endswith(f" {release} main")})
    suites = [f"deb {url} {release}{more} main" for url in urls for more in ("", "-backports")]
    sources.write_text("\n".join(suites) + "\n")
    options = {"Dir::Etc::sourcelist": sources, "Dir::Etc::sourceparts": "/dev/null"}
    options |= {
        "Dir::State::lists": state / "lists",
        "Dir::Cache": state / "cache",
        "APT::Sandbox::User": "root",
    }
    apt = ["apt-get", *(f"-o{name}={value}" for name, value in options.items())]
    for words in ([*apt, "--quiet", "update"], [*apt, "download", *VALKEY]):
        if subprocess.run(words, cwd=state, stdout=subprocess.DEVNULL).returncode:
            print(f"what needs Valkey is not run: {' '.join(words[-3:])} failed, of {'; '.join(suites)}")
            return
    for package in state.glob("*.deb"):
        subprocess.run(["dpkg-deb", "--extract", package, folder], check=True)


if __name__ == "__main__":
    main(sys.argv[1:])
