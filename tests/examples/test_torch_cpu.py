"""Where torch comes from: real pip, real environments, small wheels of that name, an index on loopback."""

import http.server
import os
import socket
import subprocess
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from examples import torch_cpu
from tests.distributions import ROOT, Environment

CUDA_BYTES = 3_000_000  # of the library that nobody wants
LOOK = "import torch, speaker; print(torch.BUILD, torch.__file__)"


def write_wheel(
    folder: Path, name: str, version: str, module: str, requires: str = "", size: int = 0
) -> None:
    """Write a wheel of one module, with one requirement and `size` bytes of ballast."""
    folder.mkdir(parents=True, exist_ok=True)
    information = f"{name}-{version}.dist-info"
    files = {
        f"{name}/__init__.py": module,
        f"{name}/ballast": os.urandom(size).hex()[:size],
        f"{information}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{requires}",
        f"{information}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},,\n" for path in [*files, f"{information}/RECORD"])
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for path, text in {**files, f"{information}/RECORD": record}.items():
            wheel.writestr(path, text)


class Index:
    """Two indices on loopback: /cpu has torch for the CPU, /all everything and torch for CUDA."""

    def __init__(self, folder: Path) -> None:
        write_wheel(folder / "cpu" / "torch", "torch", "2.13.0+cpu", "BUILD = 'cpu'")
        cuda = "Requires-Dist: cudalibs\n"
        write_wheel(folder / "all" / "torch", "torch", "2.13.0", "BUILD = 'cuda'", cuda)
        write_wheel(folder / "all" / "cudalibs", "cudalibs", "1.0", "", size=CUDA_BYTES)
        write_wheel(folder / "all" / "speaker", "speaker", "1.0", "")
        self.asked: list[str] = []
        asked = self.asked

        class Handler(http.server.SimpleHTTPRequestHandler):
            def __init__(self, *arguments: object) -> None:
                super().__init__(*arguments, directory=str(folder))  # type: ignore[arg-type]

            def log_message(self, form: str, *values: object) -> None:
                asked.append(form % values)

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        """Stop serving."""
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    """Both indices."""
    running = Index(tmp_path / "index")
    yield running
    running.close()


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    """An environment with pip and nothing else."""
    return Environment(tmp_path / "venv", ["pip"])


def install(
    environment: Environment, index: Index, tmp_path: Path, *arguments: str, cpu: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run the script in the environment; pip is configured to look at /all."""
    requirements = tmp_path / "requirements.txt"
    requirements.write_text("torch==2.13.0  # a comment\nspeaker==1.0\n")
    command = [str(environment.python), "-m", "examples.torch_cpu", str(requirements), *arguments]
    command += ["--index", cpu or f"{index.address}/cpu"]
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "PIP_"))}
    pip = {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": f"{index.address}/all", "PIP_NO_CACHE_DIR": "1"}
    return subprocess.run(command, cwd=ROOT, env={**kept, **pip}, capture_output=True, text=True, check=False)


def test_it_comes_from_the_index_for_the_cpu(environment: Environment, index: Index, tmp_path: Path) -> None:
    done = install(environment, index, tmp_path)
    assert done.returncode == 0, done.stderr
    assert environment.run("-c", LOOK, cwd=tmp_path).startswith("cpu ")
    assert "requirements.txt: downloads 0.1 MB in 2 files; the largest is torch-2.13.0" in done.stdout
    assert not [line for line in index.asked if "cudalibs" in line]
    index.asked.clear()
    again = install(environment, index, tmp_path)
    assert (again.returncode, again.stdout) == (0, "")
    assert not [line for line in index.asked if "torch" in line]


@pytest.mark.parametrize("cpu", ["http://127.0.0.1:1/cpu", "/older"])
def test_otherwise_from_where_pip_looks_and_says_how_large(
    environment: Environment, index: Index, tmp_path: Path, cpu: str
) -> None:
    write_wheel(tmp_path / "index" / "older" / "torch", "torch", "2.12.0+cpu", "BUILD = 'old'")
    where = cpu if cpu.startswith("http") else index.address + cpu
    done = install(environment, index, tmp_path, cpu=where)
    assert done.returncode == 0, done.stderr
    assert environment.run("-c", LOOK, cwd=tmp_path).startswith("cuda ")
    assert f"{where} is not used (" in done.stdout
    assert "downloads 3.0 MB in 3 files; the largest is cudalibs-1.0-py3-none-any.whl, 3.0 MB" in done.stdout


def test_torch_of_the_system_is_linked(environment: Environment, index: Index, tmp_path: Path) -> None:
    system = Environment(tmp_path / "system", [])
    write_wheel(tmp_path / "wheels", "torch", "2.13.4", "BUILD = 'system'")
    system.install(str(tmp_path / "wheels" / "torch-2.13.4-py3-none-any.whl"))
    done = install(environment, index, tmp_path, "--system", str(system.python))
    assert done.returncode == 0, done.stderr
    assert f"torch 2.13.4 of {system.python} is used" in done.stdout
    build, place = environment.run("-c", LOOK, cwd=tmp_path).split()
    assert build == "system"
    assert Path(place).resolve() == (system.site / "torch" / "__init__.py").resolve()
    found = environment.run(
        "-c", "from importlib.metadata import version as v; print(v('torch'))", cwd=tmp_path
    )
    assert found.strip() == "2.13.4"
    assert not [line for line in index.asked if "torch" in line]


@pytest.mark.parametrize("what", ["another release", "none", "no interpreter"])
def test_torch_of_the_system_that_does_not_fit_is_left_alone(tmp_path: Path, what: str) -> None:
    system = Environment(tmp_path / "system", [])
    if what == "another release":
        write_wheel(tmp_path / "wheels", "torch", "2.12.1", "BUILD = 'system'")
        system.install(str(tmp_path / "wheels" / "torch-2.12.1-py3-none-any.whl"))
    python = tmp_path / "nowhere" if what == "no interpreter" else system.python
    assert torch_cpu.link_system_torch(str(python), "torch==2.13.0") == ""


def test_what_pip_cannot_install_fails(environment: Environment, index: Index, tmp_path: Path) -> None:
    (tmp_path / "index" / "all" / "speaker" / "speaker-1.0-py3-none-any.whl").unlink()
    done = install(environment, index, tmp_path)
    assert done.returncode != 0
    assert "speaker==1.0" in done.stderr


def test_an_index_that_is_silent_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_cpu, "PROBE_LIMIT_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        reason = torch_cpu.unanswered(f"http://127.0.0.1:{silent.getsockname()[1]}")
    assert "no answer within 0.5 s" in reason or "timed out" in reason


def test_files_of_this_machine_are_no_download(tmp_path: Path) -> None:
    assert torch_cpu.announcement([]) == ""
    local = torch_cpu.announcement([f"{(tmp_path / 'a.whl').as_uri()}"])
    assert local == "1 packages are installed; all of them are on this machine"
    unknown = torch_cpu.announcement(["http://127.0.0.1:1/a.whl"])
    assert unknown == "downloads 0.1 MB in 1 files, 1 of them of unknown size"


def test_a_list_without_torch_is_refused(tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text("torch>=2\n")
    with pytest.raises(SystemExit, match="must pin torch once, as torch==VERSION"):
        torch_cpu.main([str(tmp_path / "list.txt")])
