"""Ask kvtier daemons which host should get a prompt. Standard library only: copy this file into a router.

    fleet = RankClient(["10.0.0.1:9464", "10.0.0.2:9464"])
    names = prefix_hashes(prompt_tokens, block_tokens=16)
    host = fleet.best(namespace_digest, names, {"10.0.0.1:7070": 0.8, "10.0.0.2:7070": 0.0})

The addresses are those of `observe.http`, each of which answers for the whole fleet; docs/web-api.md has the
answer's fields, docs/operate/fleet.md what they mean. The names are those that the runtime's connector gives
its blocks, which `prefix_hashes` computes as kvtier's own clients do.
"""

import base64
import hashlib
import http.client
import json
import socket
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


class RankRefused(Exception):
    """A daemon understood the question and refuses it; the message says the fix."""


def prefix_hashes(tokens: Sequence[int], block_tokens: int, extra_keys: Iterable[bytes] = ()) -> list[bytes]:
    """Return the 32-byte name of each full block of a prompt, as docs/prefix-hash.md specifies."""
    keys, names, parent = list(extra_keys), list[bytes](), b""
    tail = b"".join([len(keys).to_bytes(4, "big"), *(len(key).to_bytes(4, "big") + key for key in keys)])
    head = b"kvtier.prefix.1" + block_tokens.to_bytes(4, "big")
    for first in range(0, len(tokens) - block_tokens + 1, block_tokens):
        content = b"".join(token.to_bytes(8, "little") for token in tokens[first : first + block_tokens])
        parent = hashlib.sha256(b"".join([head, bytes([len(parent)]), parent, content, tail])).digest()
        names.append(parent)
    return names


class RankClient:
    """Asks one daemon after the other until one answers. For one thread: each has a client of its own.

    `token`: one that `observe.readers` names, needed where other hosts reach the daemons' listener.
    `timeout_s`: of each daemon.
    """

    def __init__(self, daemons: Sequence[str], token: str = "", timeout_s: float = 0.5) -> None:
        self._daemons = list(daemons)
        self._headers = {"Content-Type": "application/json"}
        if token:
            self._headers["Authorization"] = f"Bearer {token}"
        self._timeout_s = timeout_s
        self._connection: http.client.HTTPConnection | None = None  # to the first one of `daemons`

    def best(
        self, namespace: bytes, names: Sequence[bytes], queues: Mapping[str, float] | None = None
    ) -> str | None:
        """Return the host that should get a prompt, None when no daemon answers: route as without."""
        ranking = self.rank(namespace, names, queues)
        hosts = ranking["hosts"] if ranking is not None else []
        return str(hosts[0]["address"] or hosts[0]["name"]) if hosts else None

    def rank(
        self, namespace: bytes, names: Sequence[bytes], queues: Mapping[str, float] | None = None
    ) -> dict[str, Any] | None:
        """Return the ranking, None when no daemon answers. Raises RankRefused.

        `namespace`: digest of 32 bytes; `names`: prefix hashes of 32 bytes, at most 4,096; `queues`: the
        hosts to choose from and the seconds of prefill that wait at each, all hosts where it is None.
        """
        asked = {"namespace": namespace.hex(), "prefix_hashes": base64.b64encode(b"".join(names)).decode()}
        body = json.dumps({**asked, "queues": dict(queues or {})}).encode()
        for _ in range(len(self._daemons) + 1):  # once more than there are: a kept connection may be closed
            is_kept = self._connection is not None
            try:
                return self._ask(body)
            except (OSError, http.client.HTTPException, ValueError):
                self.close()
                if not is_kept:
                    self._daemons.append(self._daemons.pop(0))
        return None

    def _ask(self, body: bytes) -> dict[str, Any]:
        if self._connection is None:
            host, _, port = self._daemons[0].rpartition(":")
            # By address: a daemon refuses requests that name it otherwise (docs/web-api.md).
            address = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0][4]
            self._connection = http.client.HTTPConnection(str(address[0]), int(port), timeout=self._timeout_s)
        self._connection.request("POST", "/api/rank", body, self._headers)
        response = self._connection.getresponse()
        answer = response.read()
        if response.status >= 500 or response.status == 429:
            raise OSError(f"status {response.status}")
        found = json.loads(answer) if response.headers.get_content_type() == "application/json" else {}
        if response.status != 200:
            raise RankRefused(found.get("message", answer.decode("utf-8", "replace").strip()))
        return dict(found)

    def close(self) -> None:
        """Close the connection. Idempotent."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
