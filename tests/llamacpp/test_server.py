"""llama.cpp's own server over HTTP, its slot in kvtier: killed, and another goes on where it stopped."""

import importlib.util
import json
import urllib.request
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from kvtier.clients.llamacpp import ServerSlots

from ..daemon import Daemon
from .models import make
from .server import EXECUTABLE, executable, library

BLOCK_TOKENS = 32
HAS_LIBRARY = importlib.util.find_spec("xllamacpp") is not None
SERVERS = [
    pytest.param(
        library,
        id="library",
        marks=pytest.mark.skipif(not HAS_LIBRARY, reason="no xllamacpp: `make test-llamacpp` installs it"),
    ),
    pytest.param(
        executable,
        id="llama-server",
        marks=pytest.mark.skipif(not EXECUTABLE, reason="LLAMA_SERVER has no path of a llama-server"),
    ),
]


def words(seed: int, number: int) -> list[int]:
    return [3 + (seed * 7919 + i * i * 31 + i * 17) % 509 for i in range(number)]


def complete(url: str, prompt: list[int], from_scratch: bool = False) -> tuple[list[int], int]:
    """Return the answer's tokens, and how many of the prompt's were computed."""
    body = {
        "prompt": prompt,
        "n_predict": 12,
        "id_slot": 0,
        "temperature": 0,
        "ignore_eos": True,
        "return_tokens": True,
        "cache_prompt": not from_scratch,
    }
    asked = urllib.request.Request(
        f"{url}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(asked, timeout=60) as answer:
        told: dict[str, Any] = json.load(answer)
    return told["tokens"], told["timings"]["prompt_n"]


@pytest.mark.parametrize("running", SERVERS)
def test_another_server_goes_on_where_one_stopped(
    running: Callable[[Path, Path], AbstractContextManager[str]],
    model: Path,
    daemon: Daemon,
    tmp_path: Path,
) -> None:
    prompt = words(1, 300)

    def slots_of(url: str) -> ServerSlots:
        return ServerSlots(url, tmp_path, model, daemon.target, block_tokens=BLOCK_TOKENS)

    with running(model, tmp_path) as url:
        slots = slots_of(url)
        assert slots.restore(prompt) == 0
        answer, num_computed = complete(url, prompt)
        assert num_computed == len(prompt)
        assert slots.save() == (len(prompt) + len(answer) - 1) // BLOCK_TOKENS
        assert slots.save() == 0, "what is stored does not travel again"
        slots.close()
    longer, branch = [*prompt, *answer, *words(2, 90)], [*prompt[:170], *words(3, 60)]
    with running(model, tmp_path) as url:
        slots = slots_of(url)
        for asked, num_found in ((longer, 288), (branch, 160)):
            assert slots.restore(asked) == num_found
            found, num_computed = complete(url, asked)
            assert num_computed == len(asked) - num_found
            assert found == complete(url, asked, from_scratch=True)[0]
        daemon.stop()
        assert (slots.restore(prompt), slots.save()) == (0, 0)
        assert complete(url, prompt)[0] == answer
        slots.close()
    assert not list(tmp_path.glob("kvtier-*.bin"))


@pytest.mark.parametrize("running", SERVERS)
def test_the_size_of_the_context_counts_where_a_model_has_two_rope_factors(
    running: Callable[[Path, Path, int], AbstractContextManager[str]], daemon: Daemon, tmp_path: Path
) -> None:
    """llama.cpp takes the long ones for all tokens of a context of more than 1,024."""
    model, prompt, answers = make(tmp_path / "long.gguf", short_tokens=1024), words(1, 300), []
    for num_tokens in (1024, 2048):
        with running(model, tmp_path, num_tokens) as url:
            slots = ServerSlots(url, tmp_path, model, daemon.target, block_tokens=BLOCK_TOKENS)
            assert slots.restore(prompt) == 0, "the other one's KV is not that of this one"
            answers.append(complete(url, prompt)[0])
            assert slots.save() > 0
            slots.close()
    assert answers[0] != answers[1], "the test shows nothing"
