"""llama.cpp's own server with one slot, which it writes to a folder: the one in the library of the package
xllamacpp, which `python -m tests.llamacpp.server MODEL FOLDER TOKENS` runs, and the executable
`llama-server`, if LLAMA_SERVER has its path.
"""

import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..ports import free_port
from ..waiting import until

EXECUTABLE = os.environ.get("LLAMA_SERVER", "")


@contextmanager
def library(model: Path, folder: Path, num_tokens: int = 2048) -> Iterator[str]:
    """Run the library's; yield its address."""
    command = [sys.executable, "-m", __name__, str(model), str(folder), str(num_tokens)]
    with (
        (folder / "server.log").open("ab") as log,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
        ) as process,
    ):
        assert process.stdout
        try:
            yield next(line.strip() for line in process.stdout if line.startswith("http"))
        finally:
            process.kill()


@contextmanager
def executable(model: Path, folder: Path, num_tokens: int = 2048) -> Iterator[str]:
    """Run the executable as docs/integrations/llama-cpp.md says; yield its address."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [EXECUTABLE, "-m", str(model), "--parallel", "1", "--slot-save-path", f"{folder}/"]
    command += ["--ctx-size", str(num_tokens), "--threads", "2", "--port", str(port)]
    with (folder / "server.log").open("ab") as log, subprocess.Popen(command, stderr=log) as process:
        try:
            until(lambda: _is_healthy(url), f"{EXECUTABLE} does not answer", pause_s=0.1)
            yield url
        finally:
            process.kill()


def _is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def main() -> None:
    """Serve until the standard input ends."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.slot_save_path = sys.argv[1], f"{sys.argv[2]}/"
    params.n_ctx = int(sys.argv[3])
    params.n_parallel, params.port, params.cpuparams.n_threads = 1, 0, 2
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
