"""What needs llama.cpp is collected only where it is: `make test-llamacpp`. The rest runs everywhere."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..daemon import Daemon
from .models import make

collect_ignore = [] if importlib.util.find_spec("llama_cpp") else ["test_cache.py", "test_slots.py"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    with Daemon(tmp_path) as running:
        yield running
