"""A slot of an older llama-server in kvtier: this one answers the four calls with the functions of llama.cpp
that llama-server calls for them (`llama_state_seq_save_file`, `_load_file`). test_server.py has a real one.
"""

import ctypes
import json
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import llama_cpp
import numpy as np
import pytest

from kvtier.clients.llamacpp import ServerSlots

from ..daemon import Daemon
from .test_cache import BLOCK_TOKENS, answer, closed, llama, right, words

__all__ = ["closed"]  # a fixture


PROPS = {
    "build_info": "b1",
    "model_path": "tiny.gguf",
    "default_generation_settings": {"n_ctx": 1024},
}


class Server:
    """One slot. `packs`: whether tokens are written as since 2026."""

    def __init__(self, model: Path, folder: Path, packs: bool) -> None:
        self.llm, self.folder, self.packs = llama(model), folder, packs
        self.about: dict[str, Any] = {
            "/props": PROPS,
            "/lora-adapters": [{"id": 0, "path": "a.gguf", "scale": 0.0}],
        }

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        if not body.get("cache_prompt", True):
            self.llm.reset()
            self.llm._ctx.kv_cache_clear()
        return {"tokens": answer(self.llm, body["prompt"], body["n_predict"])}

    def act(self, action: str, filename: str) -> dict[str, Any]:
        path, context = str(self.folder / filename).encode(), self.llm._ctx.ctx
        if action == "save":
            tokens = np.asarray(self.llm.input_ids[: self.llm.n_tokens], "<i4")
            if self.packs:
                head, tail = struct.pack("<iII", -1, 1, len(tokens)), struct.pack("<I", 0)
                tokens = np.frombuffer(head + tokens.tobytes() + tail, "<i4")
            values = (llama_cpp.llama_token * len(tokens))(*tokens)
            assert llama_cpp.llama_state_seq_save_file(context, path, 0, values, len(tokens))
        else:
            space = (llama_cpp.llama_token * self.llm.n_ctx())()
            num = ctypes.c_size_t()
            read = llama_cpp.llama_state_seq_load_file(context, path, 0, space, len(space), ctypes.byref(num))
            assert read, "llama.cpp does not take the file"
            self.llm.n_tokens = num.value
            self.llm.input_ids[: num.value] = list(space)[: num.value]
        return {}


@contextmanager
def serving(server: Server) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._tell(server.about[self.path])

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            _, _, action = self.path.partition("?action=")
            self._tell(server.act(action, body["filename"]) if action else server.complete(body))

        def _tell(self, said: Any) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(said).encode())

        def log_message(self, *_: Any) -> None:
            pass

    listening = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=listening.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.server_address[1]}"
    finally:
        listening.shutdown()
        thread.join()
        listening.server_close()


@pytest.mark.parametrize("packs", [False, True], ids=["plain tokens", "packed tokens"])
def test_another_server_goes_on_where_one_stopped(
    model: Path, daemon: Daemon, tmp_path: Path, packs: bool
) -> None:
    prompt = words(1, 300)
    expected = right(model, prompt)
    with serving(first := Server(model, tmp_path, packs)) as url:
        slots = ServerSlots(url, tmp_path, model, daemon.target, block_tokens=BLOCK_TOKENS)
        assert slots.restore(prompt) == 0
        assert first.complete({"prompt": prompt, "n_predict": 12})["tokens"] == expected
        assert slots.save() == (300 + 11) // BLOCK_TOKENS
        assert slots.save() == 0, "what is stored does not travel again"
        slots.close()
    longer, branch = [*prompt, *expected, *words(2, 90)], [*prompt[:170], *words(3, 60)]
    with serving(second := Server(model, tmp_path, packs)) as url:
        slots = ServerSlots(url, tmp_path, model, daemon.target, block_tokens=BLOCK_TOKENS)
        for asked, num_found in ((longer, 288), (branch, 160)):
            assert slots.restore(asked) == num_found
            assert second.llm.n_tokens == num_found
            assert second.complete({"prompt": asked, "n_predict": 12})["tokens"] == right(model, asked)
        daemon.stop()
        assert (slots.restore(prompt), slots.save()) == (0, 0)
        slots.close()
    assert (slots.restore(prompt), slots.save()) == (0, 0), "the server is gone"
    assert slots.guard.causes["NO_SERVER"] == 1
    assert not list(tmp_path.glob("kvtier-*.bin"))


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("/props", {"build_info": "b1", "model_path": "fine-tuned.gguf"}),
        ("/props", {"build_info": "b2", "model_path": "tiny.gguf"}),
        ("/lora-adapters", [{"id": 0, "path": "a.gguf", "scale": 1.0}]),
        ("/props", {**PROPS, "default_generation_settings": {"n_ctx": 2048}}),
    ],
    ids=["another model", "another build", "another scale", "another context"],
)
def test_a_server_that_came_to_be_another_stores_and_gets_nothing(
    model: Path, daemon: Daemon, tmp_path: Path, path: str, told: Any
) -> None:
    prompt = words(1, 100)
    with serving(server := Server(model, tmp_path, packs=True)) as url:
        slots = ServerSlots(url, tmp_path, model, daemon.target, block_tokens=BLOCK_TOKENS)
        server.complete({"prompt": prompt, "n_predict": 1})
        assert slots.save() > 0
        before, server.about[path] = server.about[path], told
        server.complete({"prompt": words(2, 100), "n_predict": 1})
        assert (slots.restore(prompt), slots.save()) == (0, 0)
        server.about[path] = before
        assert (slots.restore(prompt), slots.save()) == (0, 0), "its KV is in the slot"
        assert slots.guard.causes["OTHER_SERVER"] == 4
        slots.close()
    assert not list(tmp_path.glob("kvtier-*.bin"))
