"""`python -m tests.llamacpp.server MODEL FOLDER`: llama.cpp's own server, of the package xllamacpp, with one
slot that it writes to FOLDER. Prints its address; ends with its input."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def running(model: Path, folder: Path) -> Iterator[str]:
    """Run it; yield its address."""
    command = [sys.executable, "-m", __name__, str(model), str(folder)]
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


def main() -> None:
    """Serve until the standard input ends."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.slot_save_path = sys.argv[1], f"{sys.argv[2]}/"
    params.n_ctx, params.n_parallel, params.port, params.cpuparams.n_threads = 2048, 1, 0, 2
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
