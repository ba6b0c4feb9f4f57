"""`python -m tests.native.emulated FOLDER`: an environment of aarch64's Python, which qemu-user runs.

Debian's Python is unpacked below FOLDER, and `FOLDER/bin/python` is a script that runs it, so that processes
that it starts as `sys.executable` are emulated, too. Other programs are the host's. Nothing is registered
with the kernel, and the host's packages stay of its own architecture. Installs the compiler and the emulator
where they are missing and root may; says the command otherwise.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.debian import unpack

TOOLS = {"qemu-aarch64": "qemu-user", "aarch64-linux-gnu-gcc": "gcc-aarch64-linux-gnu libc6-dev-arm64-cross"}
#: Python with its modules, and the libraries that these and the wheels of the index load.
PACKAGES = (
    "python3.11-minimal libpython3.11-minimal libpython3.11-stdlib libc6 libgcc-s1 libstdc++6 zlib1g "
    "libbz2-1.0 liblzma5 libexpat1 libssl3 libcrypt1 libffi8 libsqlite3-0 libuuid1"
)
RUN = '#!/bin/sh\nexec qemu-aarch64 -L "{root}" -0 "$0" "{root}/usr/bin/python3.11" "$@"\n'


def main(folder: Path) -> None:
    """Make the environment in `folder`, which is emptied."""
    if missing := [packages for program, packages in TOOLS.items() if not shutil.which(program)]:
        command = f"apt-get install --yes --no-install-recommends {' '.join(missing)}".split()
        if os.geteuid() or not shutil.which("apt-get"):
            sys.exit(f"missing; as root: {' '.join(command)}")
        subprocess.run(["apt-get", "update", "--quiet"], check=True, stdout=subprocess.DEVNULL)
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    shutil.rmtree(folder, ignore_errors=True)
    root, program = folder / "root", folder / "bin" / "python"
    if reason := unpack(root, PACKAGES.split(), architecture="arm64"):
        sys.exit(reason)
    (folder / "lib/python3.11/site-packages").mkdir(parents=True)
    (folder / "pyvenv.cfg").write_text("home = /usr/bin\ninclude-system-site-packages = false\n")
    program.parent.mkdir()
    program.write_text(RUN.format(root=root))
    program.chmod(0o755)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
