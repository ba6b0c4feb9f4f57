"""Packages of Debian unpacked into a folder: nothing of the system changes, and no root is needed."""

import platform
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path


def unpack(
    folder: Path, packages: Iterable[str], suites: Iterable[str] = ("",), architecture: str = ""
) -> str:
    """Unpack packages of this release below `folder`, with lists of packages of its own.

    `suites` are endings of its name, such as "-backports"; `architecture` is Debian's name of another one.
    What the packages depend on is not unpacked. Returns why not where it cannot.
    """
    if not shutil.which("apt-get"):
        return "there is no apt-get"
    state, sources = folder / "apt", folder / "apt" / "sources.list"
    for name in ("lists/partial", "cache/archives/partial"):
        (state / name).mkdir(parents=True, exist_ok=True)
    release = platform.freedesktop_os_release().get("VERSION_CODENAME", "")
    targets = ["apt-get", "indextargets", "--format", "$(REPO_URI) $(CODENAME) $(COMPONENT)"]
    known = subprocess.run(targets, check=True, capture_output=True, text=True).stdout.splitlines()
    urls = sorted({line.split()[0] for line in known if line.endswith(f" {release} main")})
    lines = [f"deb {url} {release}{more} main" for url in urls for more in suites]
    sources.write_text("\n".join(lines) + "\n")
    options: dict[str, object] = {
        "Dir::Etc::sourcelist": sources,
        "Dir::Etc::sourceparts": "/dev/null",
        "Dir::State::lists": state / "lists",
        "Dir::Cache": state / "cache",
        "APT::Sandbox::User": "root",
    }
    if architecture:
        options |= {"APT::Architecture": architecture, "APT::Architectures": architecture}
        options |= {"Dir::State::status": "/dev/null"}
    apt = ["apt-get", *(f"-o{name}={value}" for name, value in options.items())]
    for words in ([*apt, "--quiet", "update"], [*apt, "download", *packages]):
        if subprocess.run(words, cwd=state, stdout=subprocess.DEVNULL).returncode:
            return f"{' '.join(words[-3:])} failed, of {'; '.join(lines)}"
    for package in state.glob("*.deb"):
        subprocess.run(["dpkg-deb", "--extract", package, folder], check=True)
    shutil.rmtree(state)
    return ""
