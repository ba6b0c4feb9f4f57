"""`make first-hour`: goes through a new user's first hour with what users install, and prints all of it.

It clones the repository into `a new user/kvtier`, builds the wheel, installs that into empty environments
(a runtime's, and the daemon's with `server` and `cli`), runs the commands of the pages beside this file in
empty folders, and photographs the page of daemons with one, two and three tiers.

The steps are Markdown, run by the machinery that runs the documentation's commands
(`tests/docs/commands.py`): what must be seen stands below each command, and the transcript is printed to
be read, because a message can be asserted and still be unclear. Rejected: pytest, which hides what passes.
A page that begins with `<!-- as root -->` is left out for other users, in words.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ..docs.commands import PageSession, commands_of, is_seen

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *sorted(Path(__file__).parent.glob("*.md")),
    *(ROOT / "docs" / name for name in ("quickstart.md", "operate/certificates.md")),
]
AS_ROOT = "<!-- as root -->"
#: What `pip install kvtier` may bring into a runtime: the three of pyproject.toml, and what they need.
RUNTIME = {"kvtier", "grpcio", "numpy", "protobuf", "typing_extensions"}
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
QUIET = "-qq"  # one -q still prints warnings of the index


def main() -> int:
    """Go through it; return 0 when everything was as the pages say."""
    parser = argparse.ArgumentParser(prog="python -m tests.first_hour", description=main.__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "first-hour", help="where pictures go")
    parser.add_argument("--page", help="only pages with this in their name, and no pictures")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kv") as name:
        folder = Path(name)
        folder.chmod(0o755)  # another user's commands are run below it
        wheel = build_wheel(folder)
        check_runtime(folder / "runtime", wheel)
        programs = environment(folder / "daemon", f"{wheel}[server,cli]")
        wrong = [
            line
            for page in PAGES
            if (arguments.page or "") in page.name
            for line in run(page, folder, programs)
        ]
    if not arguments.page:
        wrong += photograph(arguments.out)
    print("\n== the first hour:", "as it should be" if not wrong else "")
    print("\n".join(wrong))
    return bool(wrong)


def build_wheel(folder: Path) -> Path:
    """Return the wheel of a fresh clone in a folder named kvtier, on a path with a space."""
    clone = folder / "a new user" / "kvtier"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    subprocess.run([*PIP, "wheel", QUIET, "--no-deps", "--wheel-dir", str(folder), str(clone)], check=True)
    [wheel] = folder.glob("kvtier-*.whl")
    print(f"== {wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB")
    return wheel


def environment(home: Path, requirement: str) -> Path:
    """Return the `bin` of a new environment with `requirement` in it."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
    subprocess.run(
        [*PIP, "--python", str(home / "bin" / "python"), "install", QUIET, requirement], check=True
    )
    size = sum(path.stat().st_size for path in home.rglob("*") if path.is_file() and not path.is_symlink())
    print(f"== installed {Path(requirement).name}: {size / 1e6:.0f} MB")
    return home / "bin"


def check_runtime(home: Path, wheel: Path) -> None:
    """Install what a runtime installs; nothing but `RUNTIME` may come with it."""
    python = environment(home, str(wheel)) / "python"
    listed = subprocess.run(
        [*PIP, "--python", str(python), "list", "--format", "json"], capture_output=True, check=True
    )
    names = {package["name"].lower().replace("-", "_") for package in json.loads(listed.stdout)}
    assert names == RUNTIME, names
    subprocess.run([str(python), "-c", "import kvtier.clients, kvtier.v1"], cwd=home, check=True)


def run(page: Path, folder: Path, programs: Path) -> Iterator[str]:
    """Run a page in an empty folder and print the transcript; yield what is not as it says."""
    text = page.read_text()
    if text.startswith(AS_ROOT) and os.geteuid() != 0:
        print(f"\n== {page.stem}: left out, it needs root")
        return
    print(f"\n== {page.stem}")
    room = folder / page.stem
    room.mkdir(mode=0o755)
    session = PageSession(room, programs)
    try:
        for command in commands_of(text):
            if command.why_not:
                continue
            status, printed = session.run(command)
            print("\n$ " + command.text.strip().replace("\n", "\n  "), printed.rstrip(), sep="\n", flush=True)
            last = command.text.strip().splitlines()[-1]
            if status != command.status:
                yield f"{page.stem}: `{last}` ended with {status}, not {command.status}"
            for line in command.shown:
                if not is_seen(line, printed):
                    yield f"{page.stem}: `{last}` did not say {line!r}"
    finally:
        session.close()


def photograph(out: Path) -> list[str]:
    """Write pictures of pages with one, two and three tiers; say in words when nothing can take them."""
    if shutil.which("chromium") is None and "KVTIER_CHROMIUM" not in os.environ:
        return ["no pictures: apt install chromium, or set KVTIER_CHROMIUM"]
    shutil.rmtree(out, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "tests.web.pictures", str(out), "--tiers"], cwd=ROOT, check=True)
    print(f"\n== pictures to look at: {', '.join(sorted(path.name for path in out.iterdir()))} in {out}")
    return []


if __name__ == "__main__":
    sys.exit(main())
