"""POST /api/rank: what a router is told, by whom it may be asked, and what is refused."""

import base64
import http.client
import json
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import pytest

from examples.rank_client import RankClient, RankRefused
from examples.rank_client import prefix_hashes as own_names
from kvtier.appliance.observability.http_server import MAX_BODY_BYTES
from kvtier.clients import Client, NamespaceIdentity, prefix_hashes

from ...generated import ROOT
from ...ports import free_port
from ..loops import DaemonThread
from .conftest import CHAIN_BLOCKS, GEOMETRY, IDENTITY, Start, names, use
from .test_readers import TOKENS, WITH_TOKEN, Make, connect, make

__all__ = ["make"]
DIGEST = IDENTITY.digest.hex()
DOCUMENT = (ROOT / "docs" / "web-api.md").read_text()


def packed(chain: str, num_blocks: int = CHAIN_BLOCKS) -> str:
    return base64.b64encode(b"".join(names(chain, num_blocks))).decode()


def post(served: DaemonThread, body: bytes | str, authorization: str = "", path: str = "/api/rank") -> Any:
    """Return status and value of an answer; of one that is no JSON its text."""
    connection = connect(served)
    try:
        headers = {"Authorization": authorization} if authorization else {}
        connection.request("POST", path, body, headers)
        answer = connection.getresponse()
        text = answer.read().decode()
        is_json = answer.headers["Content-Type"] == "application/json"
        return answer.status, json.loads(text) if is_json else text
    finally:
        connection.close()


def asked(chain: str = "0", **more: Any) -> str:
    return json.dumps({"namespace": DIGEST, "prefix_hashes": packed(chain), **more})


def test_the_ranking_is_what_its_page_says(start: Start) -> None:
    shown = start()
    use(shown)
    status, found = post(shown.served, asked())
    documented = json.loads(DOCUMENT.split("```json")[-1].split("```")[0])
    assert status == 200
    assert found.keys() == documented.keys()
    assert found["hosts"][0].keys() == documented["hosts"][0].keys()
    assert found["hosts"][0]["load"].keys() == documented["hosts"][0]["load"].keys()
    with Client(shown.target) as client:
        same = client.rank(client.register(IDENTITY), names("0"))
    assert found["num_blocks"] == same.num_blocks == CHAIN_BLOCKS
    assert found["hosts"][0]["num_held"] == same.hosts[0].num_held
    assert found["hosts"][0]["is_self"]
    queued = post(shown.served, asked(queues={"10.9.9.9:7070": 1.5}))[1]["hosts"]
    assert [(one["address"], one["queue_s"], one["is_known"]) for one in queued] == [
        ("10.9.9.9:7070", 1.5, False)
    ]


WRONG: dict[str, tuple[bytes | str, int, str]] = {
    "nothing": (b"", 400, "BAD_REQUEST"),
    "no JSON": (b"\xff{", 400, "BAD_REQUEST"),
    "a list": (b"[]", 400, "BAD_REQUEST"),
    "very deep": (b"[" * 100_000, 400, "BAD_REQUEST"),
    "another field": (asked(tenant="acme"), 400, "BAD_REQUEST"),
    "no namespace": (json.dumps({"prefix_hashes": packed("0")}), 400, "BAD_REQUEST"),
    "a number for a namespace": (asked(namespace=7), 400, "BAD_REQUEST"),
    "a short namespace": (asked(namespace="ab"), 400, "BAD_NAMESPACE"),
    "a namespace of nobody": (asked(namespace="ab" * 32), 404, "UNKNOWN_NAMESPACE"),
    "names that are no base64": (asked(prefix_hashes="é!"), 400, "BAD_REQUEST"),
    "no names": (asked(prefix_hashes=""), 400, "BAD_KEY"),
    "half a name": (asked(prefix_hashes="AAAA"), 400, "BAD_KEY"),
    "too many names": (asked(prefix_hashes=packed("0", 4097)), 400, "TOO_MANY_BLOCKS"),
    "a list of queues": (asked(queues=["a"]), 400, "BAD_REQUEST"),
    "a queue of text": (asked(queues={"a": "1"}), 400, "BAD_REQUEST"),
    "a queue of yes": (asked(queues={"a": True}), 400, "BAD_REQUEST"),
    "a negative queue": (asked(queues={"a": -1}), 400, "BAD_REQUEST"),
    "a queue without end": (asked(queues={"a": float("inf")}), 400, "BAD_REQUEST"),
    "an enormous queue": (asked(queues={"a": 10**400}), 400, "BAD_REQUEST"),
    "half a character": (asked(queues={"\ud800": 1}), 400, "BAD_REQUEST"),
    "too many hosts": (asked(queues={str(n): 0 for n in range(1025)}), 400, "BAD_REQUEST"),
}


def test_wrong_questions_are_refused_with_a_reason(start: Start) -> None:
    shown = start()
    use(shown)
    for words, (body, status, reason) in WRONG.items():
        found, value = post(shown.served, body)
        assert (found, value["reason"]) == (status, reason), words
    assert post(shown.served, b"x" * (MAX_BODY_BYTES + 1))[0] == 413
    assert post(shown.served, b"x" * (MAX_BODY_BYTES + 1), path="/metrics")[0] == 405
    assert shown.request("GET", "/api/rank")[0] == 405
    assert shown.request("POST", "/api/rank", {"Host": "rebound.example"})[0] == 421
    assert post(shown.served, asked())[0] == 200


def test_a_body_that_waits_to_be_asked_for_is_asked_for(start: Start) -> None:
    """curl sends larger bodies after `100 Continue` only."""
    shown = start()
    use(shown)
    assert shown.daemon.observability.http is not None
    body = asked().encode()
    connection = http.client.HTTPConnection(
        urlsplit(shown.daemon.observability.http.address).netloc, timeout=60
    )
    connection.putrequest("POST", "/api/rank")
    connection.putheader("Content-Length", str(len(body)))
    connection.putheader("Expect", "100-continue")
    connection.endheaders()
    assert connection.sock.recv(25).startswith(b"HTTP/1.1 100")
    connection.sock.sendall(body)
    assert b"HTTP/1.1 200" in connection.sock.recv(1 << 16)
    connection.close()


def test_with_tenants_it_is_for_none(make: Make) -> None:
    """The namespace is there, and a reader reads: what its tenant stored is not confirmed."""
    served = make(["prometheus"], WITH_TOKEN)
    identity = replace(IDENTITY, domain="tenant:bolt")
    register(served, identity)
    question = asked(namespace=identity.digest.hex())
    assert post(served, question, f"Bearer {TOKENS['prometheus']}")[1]["reason"] == "NO_TENANT"
    for authorization in ("", "Bearer wrong", f"Bearer {TOKENS['bolt']}"):
        assert post(served, question, authorization)[0] == 401


def test_other_hosts_need_a_token(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    served = make("auto")
    register(served, IDENTITY)
    assert post(served, asked())[0] == 200
    server = served.daemon.observability.http
    assert server is not None
    monkeypatch.setattr(server, "host", "0.0.0.0")  # as if it listened there
    status, found = post(served, asked())
    assert (status, found["reason"]) == (401, "NOT_AUTHENTICATED")


def test_a_reader_s_token_asks_from_anywhere(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    served = make(["prometheus"])
    register(served, IDENTITY)
    server = served.daemon.observability.http
    assert server is not None
    monkeypatch.setattr(server, "host", "0.0.0.0")
    assert post(served, asked())[0] == 401
    assert post(served, asked(), f"Bearer {TOKENS['prometheus']}")[0] == 200


def test_the_client_in_one_file_asks_the_next_daemon_when_one_is_gone(start: Start) -> None:
    shown = start()
    use(shown)
    assert shown.daemon.observability.http is not None
    address = urlsplit(shown.daemon.observability.http.address).netloc
    gone = f"127.0.0.1:{free_port()}"
    client = RankClient([gone, address], timeout_s=60.0)
    for _ in range(3):  # the second time over the same connection
        found = client.rank(IDENTITY.digest, names("0"))
        assert found is not None
        assert found["hosts"][0]["is_self"]
    assert client.best(IDENTITY.digest, names("0"), {"10.9.9.9:7070": 0.0}) == "10.9.9.9:7070"
    shown.served.call(shown.daemon.observability.http.close_connections)
    assert client.best(IDENTITY.digest, names("0")) is not None
    with pytest.raises(RankRefused, match="registered"):
        client.rank(bytes(32), names("0"))
    assert RankClient([gone], timeout_s=60.0).best(IDENTITY.digest, names("0")) is None
    client.close()


@pytest.mark.parametrize("keys", [[], [b"salt", b""]])
def test_the_client_in_one_file_names_blocks_as_kvtier_does(keys: list[bytes]) -> None:
    tokens = [*range(70), 2**64 - 1, *range(10)]
    assert own_names(tokens, 16, keys) == prefix_hashes(GEOMETRY, tokens, extra_keys=keys)


def register(served: DaemonThread, identity: NamespaceIdentity) -> None:
    """Register a namespace, of whichever domain."""
    planner = served.daemon.planner
    served.call(lambda: planner.requests.add_namespace(identity) and None)
