"""llama-server's slot in kvtier: what it computed is kept in blocks, and a longer prompt gets it back.

    slots = ServerSlots("http://localhost:8080", folder, "model.gguf")     # before the first prompt
    slots.restore(tokens)              # the longest stored beginning, into the slot
    ...                                # POST /completion, {"prompt": tokens, "id_slot": 0}
    slots.save()                       # what is new

llama-server has no cache to plug into; it writes a slot to a file of `--slot-save-path` and reads one back.
The file (llama-context.cpp, server-common.cpp) has a head, the slot's tokens, and the state as state.py reads
it but for the architecture:

    u32 "ggsq", u32 version (3 or 4), u32 number of tokens; tokens, i32 each
             since 2026 a token -1, u32 version (1), u32 number, tokens, u32 number of media (0)
    u32 streams, u32 cells, ...

Files as they are, one a conversation, were rejected: a state of 8k tokens once a turn, and nothing of it for
another conversation that begins alike. Served is a server with one slot (`--parallel 1`), because cells of
others lie between.
"""

import json
import struct
import urllib.request
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np

from ...v1.types import NamespaceIdentity
from ..connector.chain_store import ChainStore
from ..connector.guard import Guard, harmless
from ..connector.opaque import opaque_identity, token_frame
from ..connector.plugin_options import ChainOptions
from ..values.keys import prefix_hashes
from ..weights import checkpoint_digest
from .state import Bytes, UnsupportedState, layout_of, num_cells

FORMAT = 1  # of a block; raise it when the same bytes would mean something else
MAGIC = 0x67677371
NUM_ROTATIONS = {3: 0, 4: 2}  # of a state, by the version of its file
TOKENS_VERSION = 1
NO_TEXT = bytes(4)  # an architecture of no letters
UNKNOWN_STATE, NO_SERVER, OTHER_SERVER = "UNKNOWN_STATE", "NO_SERVER", "OTHER_SERVER"  # causes of a miss
TIMEOUT_S = 60.0


class ServerSlots:
    """Slot 0 of a running llama-server. `folder` is its `--slot-save-path`, best in memory (/dev/shm).

    `model` is the GGUF it serves; `variant` says what else changes its KV (rope settings). Raises
    UnsupportedState where the model's state is not one row of tokens, OSError where the server does not
    answer. Afterwards a daemon or server in trouble is a miss, and so is a server that came to be another:
    of another build or model, or with other adapters."""

    def __init__(
        self,
        server: str,
        folder: str | Path,
        model: str | Path,
        target: str = "",
        *,
        block_tokens: int = 32,
        variant: str = "",
    ) -> None:
        self.block_tokens = block_tokens
        self.guard = Guard("kvtier.llamacpp")
        self._server, self._file = server, Path(folder) / f"kvtier-{uuid4().hex}.bin"
        self._frame = token_frame(block_tokens)
        self._about, self._has_changed = self._asked(), False
        self._post("/completion", {"prompt": [1, 2, 3], "n_predict": 1, "id_slot": 0, "cache_prompt": False})
        self._post("/slots/0?action=save", {"filename": self._file.name})
        self._version, _, state = self._written()
        self.layout = layout_of(state, NUM_ROTATIONS[self._version])
        options = ChainOptions(target=target, name="llama-server", variant=variant)
        self.identity = self._identity(Path(model), variant)
        self._store = ChainStore.at(options, self.guard, options.load_timeout_s, options.staging_bytes)

    @harmless(lambda *_: 0)
    def restore(self, tokens: Sequence[int]) -> int:
        """Put the longest stored beginning of a prompt into the slot, in the place of what it has.

        Returns how many tokens that are. With 0 the slot is as it was, or empty where the server failed."""
        names = prefix_hashes(self._frame, np.asarray(tokens[:-1], np.int64))
        num_found = self._store.num_available(self.identity, names) if names else 0
        blocks = np.empty((num_found, self.block_tokens * self.layout.token_bytes), np.uint8)
        num_loaded = self._store.load(self.identity, names[:num_found], list(blocks)) if num_found else 0
        if not num_loaded or not self._is_same():
            return 0
        num_tokens = num_loaded * self.block_tokens
        head = struct.pack("<III", MAGIC, self._version, num_tokens)
        state = self.layout.join(blocks[:num_loaded], self.block_tokens)[len(NO_TEXT) :]
        try:
            self._file.write_bytes(head + np.asarray(tokens[:num_tokens], "<i4").tobytes() + state.tobytes())
            return num_tokens if self._act("restore") else 0
        finally:
            self._file.unlink(missing_ok=True)

    @harmless(lambda *_: 0)
    def save(self) -> int:
        """Store what the slot has and kvtier has not; return the number of new blocks."""
        if not self._act("save"):
            return 0
        try:
            version, tokens, state = self._written()
            if not self._is_same():  # asked now: of what wrote this
                return 0
            if layout_of(state, NUM_ROTATIONS[version]) != self.layout:
                raise UnsupportedState("not the layout that this server began with")
        except UnsupportedState:
            self.guard.count(UNKNOWN_STATE)
            return 0
        num_tokens = min(len(tokens), num_cells(state))
        names = prefix_hashes(self._frame, tokens[:num_tokens].astype(np.int64))
        num_known = self._store.num_stored(self.identity, names)
        if num_known is None or num_known == len(names):
            return 0
        first = num_known * self.block_tokens
        blocks = self.layout.cut(state, first, len(names) - num_known, self.block_tokens)
        parent = names[num_known - 1] if num_known else b""
        return self._store.store(self.identity, names[num_known:], list(blocks), parent=parent).num_sent

    def close(self) -> None:
        """Close the connection; it opens again when it is used."""
        self._store.close()

    # ---------------------------------------------------------------------------------- internals

    def _is_same(self) -> bool:
        """Return whether the server has been what it was from the beginning on.

        What was another once may have left its KV in the slot."""
        try:
            self._has_changed = self._has_changed or self._asked() != self._about
        except OSError:
            self.guard.count(NO_SERVER)
            return False
        self.guard.count(OTHER_SERVER, self._has_changed)
        return not self._has_changed

    def _asked(self) -> tuple[str, str, Any, int]:
        """Return what the server says that it is: build, model, adapters with scales, size of context."""
        told = self._get("/props")
        num_tokens = told.get("default_generation_settings", {}).get("n_ctx", 0)
        return told.get("build_info", ""), told.get("model_path", ""), self._get("/lora-adapters"), num_tokens

    def _written(self) -> tuple[int, Bytes, Bytes]:
        """Return version, tokens (i4) and state of the file that the server wrote.

        Raises UnsupportedState."""
        written = np.fromfile(self._file, np.uint8)
        self._file.unlink()
        magic, version, num_words = struct.unpack("<III", written[:12].tobytes())
        if magic != MAGIC or version not in NUM_ROTATIONS:
            raise UnsupportedState(f"a slot's file of version {version}, known are 3 and 4")
        words = written[12 : 12 + 4 * num_words].view("<i4")
        if len(words) and words[0] == -1:
            num_tokens = int(words[2])
            if words[1] != TOKENS_VERSION or len(words) != num_tokens + 4 or words[-1]:
                raise UnsupportedState("a slot with images, or tokens written in another way")
            words = words[3 : 3 + num_tokens]
        state = np.concatenate([np.frombuffer(NO_TEXT, np.uint8), written[12 + 4 * num_words :]])
        return version, words, state

    def _act(self, action: str) -> bool:
        """Let the server save or restore its slot; return whether it did."""
        try:
            self._post(f"/slots/0?action={action}", {"filename": self._file.name})
        except OSError:  # gone, or an answer of 400 and above
            self.guard.count(NO_SERVER)
            return False
        return True

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(
            self._server + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            return json.loads(answer.read())

    def _get(self, path: str) -> Any:
        with urllib.request.urlopen(self._server + path, timeout=TIMEOUT_S) as answer:
            return json.loads(answer.read())

    def _identity(self, model: Path, variant: str) -> NamespaceIdentity:
        build, _, adapters, num_tokens = self._about
        facts = {
            "format": FORMAT,
            "build": build,
            "adapters": adapters,
            "n_ctx": num_tokens,  # decides which of a model's two rope factors all tokens get
            "layout": {**asdict(self.layout), "architecture": ""},
            "block_tokens": self.block_tokens,
            "variant": variant,
        }
        block_bytes = self.block_tokens * self.layout.token_bytes
        kind = f"llama-server.{FORMAT}"
        return opaque_identity(checkpoint_digest(model), block_bytes, self.block_tokens, kind, facts, "all")
