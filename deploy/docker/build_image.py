"""Builds the container image without a container engine's daemon and writes it as an archive (`make image`).

    python3 deploy/docker/build_image.py [--base REFERENCE | --base debian] FOLDER

writes FOLDER/kvtier-VERSION-image.tar, which `docker load`, `podman load` and `ctr images import` read.
Without --base the Dockerfile's own base is pulled; `debian` makes one from Debian packages, where no registry
is reachable. Needs root, Debian's `buildah` and, for --base debian, `mmdebstrap`; of Python the standard
library only.

`docker build -f deploy/docker/Dockerfile .` builds the same; this exists for machines without Docker, and so
that what was built can be tested (`make test-image`).
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "deploy" / "docker" / "Dockerfile"
CACHE = ROOT / ".cache" / "image-base.tar"
STAND_IN = "localhost/kvtier-base:debian"
#: chroot: works where no cgroup or network namespace may be made.
ISOLATION = ("--isolation", "chroot")
#: What the slim images of Debian leave out as well.
LEFT_OUT = ("doc/*", "info/*", "locale/*", "man/*", "groff/*", "lintian/*")
#: Shapes the new root $1 as the official Python images: `python`, a pip of its own, no compiled files.
LIKE_THE_OFFICIAL = (
    'ln -s python3 "$1/usr/bin/python"',
    'rm "$1"/usr/lib/python3*/EXTERNALLY-MANAGED',
    'chroot "$1" sh -c \'for wheel in /usr/share/python-wheels/pip-*.whl; do python3 -m zipfile -e "$wheel" '
    '"$(python3 -c "import sysconfig; print(sysconfig.get_path(\\"purelib\\"))")"; done\'',
    'rm -r "$1/usr/share/python-wheels"',
    'find "$1/usr" -depth -type d -name __pycache__ -exec rm -r {} +',
)
#: Options of pip that say where packages come from.
WHERE_FROM = (
    "cert",
    "default-timeout",
    "extra-index-url",
    "find-links",
    "index-url",
    "no-index",
    "trusted-host",
)


def main() -> None:
    """Build, write the archive, print its path. Exits with one line that names what is missing."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where the archive is written to")
    parser.add_argument("--base", default="", help="another base image; debian: made from Debian packages")
    given = parser.parse_args()
    if missing := what_is_missing("mmdebstrap" if given.base == "debian" else "buildah"):
        sys.exit(missing)
    if given.base == "debian":
        make_stand_in()
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    tag = f"kvtier:{version}"
    build(f"localhost/{tag}", pulled(given.base))
    archive = given.folder / f"kvtier-{version}-image.tar"
    given.folder.mkdir(parents=True, exist_ok=True)
    archive.unlink(missing_ok=True)  # buildah refuses to write into an archive that is there
    # By the name that the chart asks for by default; nodes find it there without a registry.
    run("buildah", "push", "--quiet", f"localhost/{tag}", f"docker-archive:{archive}:docker.io/library/{tag}")
    print(f"{archive}  {archive.stat().st_size / 1e6:.0f} MB")


def what_is_missing(*programs: str) -> str:
    """Return one line that says what to do first, empty when nothing is missing."""
    absent = sorted(name for name in {"buildah", *programs} if shutil.which(name) is None)
    if os.geteuid() != 0 or absent:
        return f"make image needs root{' and: apt-get install ' + ' '.join(absent) if absent else ''}"
    return ""


def make_stand_in() -> None:
    """Make STAND_IN from packages of the Debian release that the Dockerfile's base names."""
    if not CACHE.exists() or CACHE.stat().st_mtime < Path(__file__).stat().st_mtime:
        release = re.findall(r"^ARG PYTHON_IMAGE=\S+-slim-(\w+)", DOCKERFILE.read_text(), re.M)[0]
        CACHE.parent.mkdir(exist_ok=True)
        excluded = [f"--dpkgopt=path-exclude=/usr/share/{what}" for what in LEFT_OUT]
        kept = "--dpkgopt=path-include=/usr/share/doc/*/copyright"
        packages = "--include=python3,python3-pip-whl,ca-certificates"
        hooks = [f"--customize-hook={line}" for line in LIKE_THE_OFFICIAL]
        fresh = CACHE.with_suffix(".new.tar")
        options = ("--quiet", "--variant=minbase", packages, *excluded, kept, *hooks)
        run("mmdebstrap", *options, release, str(fresh))
        fresh.rename(CACHE)
    container = run("buildah", "from", "scratch")
    run("buildah", "add", "--quiet", container, str(CACHE), "/")
    path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    run("buildah", "config", "--env", f"PATH={path}", "--env", "LANG=C.UTF-8", container)
    # A time of its own each time would be another image, and nothing built on it would be found cached.
    run("buildah", "commit", "--quiet", "--rm", "--timestamp", "0", container, STAND_IN)


def pulled(base: str) -> list[str]:
    """Pull the base; return the build argument that names it. Exits when it cannot be pulled."""
    if base == "debian":
        return ["--build-arg", f"PYTHON_IMAGE={STAND_IN}"]
    reference = base or re.findall(r"^ARG PYTHON_IMAGE=(\S+)", DOCKERFILE.read_text(), re.M)[0]
    done = subprocess.run(
        ["buildah", "pull", "--quiet", reference], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        reason = done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "buildah does not say why"
        sys.exit(
            f"{reference} cannot be pulled: {reason}\nmake image BASE=debian makes a base from Debian "
            "packages; BASE=REFERENCE takes another one, e.g. that of a mirror"
        )
    return ["--build-arg", f"PYTHON_IMAGE={reference}"]


def build(tag: str, base: list[str]) -> None:
    """Build the Dockerfile under `tag`.

    In two calls, because a mount leaves its empty target behind in the image: folders that pip needs are
    mounted into the first stage only; the second call finds its layers cached.
    """
    # Docker's format: OCI's has no HEALTHCHECK.
    common = ["buildah", "bud", "--quiet", "--layers", "--format", "docker", *ISOLATION, "--network", "host"]
    common += [*base, "--file", str(DOCKERFILE)]
    with tempfile.TemporaryDirectory() as scratch:
        run(*common, *pip_mounts(Path(scratch)), "--target", "build", str(ROOT))
    run(*common, *labels(tag), "--tag", tag, str(ROOT))


def labels(tag: str) -> Iterator[str]:
    """Yield the labels that no Dockerfile can know: version and, of a clean checkout, commit."""
    yield from ("--label", f"org.opencontainers.image.version={tag.rpartition(':')[2]}")
    git = ("git", "-C", str(ROOT))
    status = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=False)
    if status.returncode == 0 and not status.stdout:
        yield from ("--label", f"org.opencontainers.image.revision={run(*git, 'rev-parse', 'HEAD')}")


def pip_mounts(scratch: Path) -> list[str]:
    """Return the options that let pip inside find packages where pip outside does.

    They mount its configuration, written into `scratch`, and the files and folders that it names.
    """
    found = {option: value for option in WHERE_FROM if (value := pip_option(option))}
    config = scratch / "pip.conf"
    lines = [f"{option} = " + "\n    ".join(value.split()) for option, value in found.items()]
    config.write_text("\n".join(["[global]", *lines, ""]))
    words = [word for value in found.values() for word in value.split()]
    paths = {word for word in words if word.startswith("/") and Path(word).exists()}
    # An index in files leads to packages beside it.
    paths |= {str(Path(word.removeprefix("file://")).parent) for word in words if word.startswith("file:///")}
    # In this order, so that a folder is mounted before what is in it.
    return [option for path in sorted(paths) for option in ("--volume", f"{path}:{path}:ro")] + [
        *("--volume", f"{config}:/etc/pip.conf:ro")
    ]


def pip_option(option: str) -> str:
    """Return the value of an option of pip, of the environment or of its files; empty when it has none."""
    if value := os.environ.get(f"PIP_{option.upper().replace('-', '_')}"):
        return value
    command = [sys.executable, "-m", "pip", "config", "get", f"global.{option}"]
    environment = {**os.environ, "PIP_QUIET": "0"}
    return subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False
    ).stdout.strip()


def run(*command: str) -> str:
    """Return what a command printed; its errors go to ours. Exits when it fails."""
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command[:2])} failed, see above\n{done.stdout[-4000:]}")
    return done.stdout.strip()


if __name__ == "__main__":
    main()
