"""Who reads metrics and the page: anyone, or with tenants whoever brings a token that is named for it."""

import base64
import http.client
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from kvtier.appliance.config import Settings, SettingsError
from kvtier.appliance.observability.http_access import NAME_READERS, token_in
from kvtier.appliance.security.tokens import hash_of, make_token

from ..conftest import small_settings
from ..loops import DaemonThread

OPEN = ("/readyz", "/healthz")
GUARDED = ("/metrics", "/", "/page.js", "/api/snapshot", "/api/stream")
TENANTS = {"acme": {"members": ["uid:1"]}, "bolt": {"members": ["uid:2"]}}
WITH_TOKEN = TENANTS | {"bolt": {"members": ["token:bolt"]}}
TOKENS = {name: make_token() for name in ("bolt", "ops", "prometheus")}
Make = Callable[..., DaemonThread]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    running = []

    def daemon(readers: object, tenants: dict[str, Any] | None = None) -> DaemonThread:
        running.append(DaemonThread(settings(tmp_path, readers, tenants or {})))
        return running[-1].__enter__()

    yield daemon
    for served in running:
        served.__exit__(None, None, None)


def settings(folder: Path, readers: object, tenants: dict[str, Any]) -> Settings:
    lines = "".join(f"{name} {hash_of(token)}\n" for name, token in TOKENS.items())
    (folder / "tokens").write_text(lines)
    return small_settings(
        folder,
        access={"tokens": str(folder / "tokens"), "admin": ["token:ops"]},
        observe={"http": "127.0.0.1:0", "readers": readers},
        tenants=tenants,
    )


def connect(served: DaemonThread) -> http.client.HTTPConnection:
    server = served.daemon.observability.http
    assert server is not None
    return http.client.HTTPConnection(urlsplit(server.address).netloc, timeout=60)


def ask(served: DaemonThread, path: str, authorization: str = "") -> tuple[int, str, str]:
    """Return status, challenge, and the first line of the body."""
    connection = connect(served)
    try:
        headers = {"Authorization": authorization} if authorization else {}
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.headers.get("WWW-Authenticate", ""), answer.readline().decode()
    finally:
        connection.close()


def basic(token: str) -> str:
    return f"Basic {base64.b64encode(f'me:{token}'.encode()).decode()}"


def test_without_tenants_anyone_reads(make: Make) -> None:
    served = make("auto")
    assert {ask(served, path)[0] for path in (*OPEN, *GUARDED)} == {200}


def test_with_tenants_nobody_reads_until_named(make: Make) -> None:
    served = make("auto", WITH_TOKEN)
    assert {ask(served, path)[0] for path in OPEN} == {200}
    for path in GUARDED:
        for token in ("", *TOKENS.values()):
            status, challenge, why = ask(served, path, f"Bearer {token}" if token else "")
            assert (status, challenge[:6], why) == (401, "Basic ", f"{NAME_READERS}\n")


@pytest.mark.parametrize("tenants", [{}, WITH_TOKEN])
def test_a_token_that_is_named_reads_and_others_do_not(make: Make, tenants: dict[str, Any]) -> None:
    served = make(["prometheus"], tenants)
    for path in GUARDED:
        assert ask(served, path, f"Bearer {TOKENS['prometheus']}")[0] == 200
        assert ask(served, path, basic(TOKENS["prometheus"]))[0] == 200
        wrong = ("", "Bearer", "Basic %%%", f"Bearer {make_token()}", TOKENS["prometheus"])
        for authorization in (*wrong, basic(TOKENS["ops"]), f"Bearer {TOKENS['bolt']}"):
            assert ask(served, path, authorization)[0] == 401, (path, authorization)
    assert {ask(served, path)[0] for path in OPEN} == {200}
    assert ask(served, "/nothing")[0] == 404


def test_anyone_is_anyone_when_that_is_spelled_out(make: Make) -> None:
    served = make("anyone", TENANTS)
    assert {ask(served, path)[0] for path in GUARDED} == {200}


def test_tenants_that_come_with_a_reload_close_the_page(make: Make, tmp_path: Path) -> None:
    served = make("auto")
    connection = connect(served)
    connection.request("GET", "/api/stream")
    stream = connection.getresponse()
    assert stream.readline() == b"event: snapshot\n"
    served.call(lambda: served.daemon._adopt(settings(tmp_path, "auto", TENANTS)))
    with pytest.raises(http.client.IncompleteRead):  # a chunked body that ends before its end
        stream.read()
    connection.close()
    assert ask(served, "/metrics")[0] == 401


def test_who_reads_follows_the_policy(make: Make, tmp_path: Path) -> None:
    served = make("auto", TENANTS)
    bearer = f"Bearer {TOKENS['prometheus']}"
    assert ask(served, "/metrics", bearer)[0] == 401
    served.call(lambda: served.daemon._adopt(settings(tmp_path, ["prometheus"], TENANTS)))
    assert ask(served, "/metrics", bearer)[0] == 200
    served.call(lambda: served.daemon._adopt(settings(tmp_path, "auto", {})))
    assert ask(served, "/metrics")[0] == 200


@pytest.mark.parametrize(
    ("readers", "tenants", "more", "words"),
    [
        (["ops"], {}, {}, "an administrator's token"),
        (["bolt"], WITH_TOKEN, {}, "a tenant's or"),
        (["UP"], {}, {}, "lower case"),
        ("everyone", {}, {}, "names of tokens"),
        ("auto", TENANTS, {"kv_events": "tcp://*:5557"}, "blocks of all tenants"),
        ("auto", TENANTS, {"kv_events": "ipc://@abstract"}, "blocks of all tenants"),
    ],
)
def test_what_would_show_tenants_each_other_is_refused(
    readers: object, tenants: dict[str, Any], more: dict[str, object], words: str
) -> None:
    access = {"tokens": "/etc/kvtier/tokens", "admin": ["token:ops"]}
    observe = {"readers": readers, **more}
    with pytest.raises(ValueError, match=words):
        Settings.model_validate({"access": access, "observe": observe, "tenants": tenants})


@pytest.mark.parametrize(("readers", "endpoint"), [("auto", "ipc:///run/e"), ("anyone", "tcp://*:5557")])
def test_events_of_tenants_are_for_a_file_or_for_anyone(readers: str, endpoint: str) -> None:
    observe = {"readers": readers, "kv_events": endpoint}
    assert Settings.model_validate({"observe": observe, "tenants": TENANTS}).observe.kv_events == endpoint


def test_readers_without_a_file_of_tokens_are_refused_where_they_are_written(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text("schema_version: 1\nobserve:\n  log: text\n  readers: [prometheus]\n")
    with pytest.raises(SettingsError, match=r"policy\.yaml:4: observe\.readers: there is no file of tokens"):
        Settings.load(path, env={})


@pytest.mark.parametrize(
    ("header", "token"),
    [
        ("Bearer kvt_x", "kvt_x"),
        ("bearer  kvt_x ", "kvt_x"),
        (basic("kvt_x"), "kvt_x"),
        ("Basic bm9jb2xvbg==", ""),
        ("Basic /w==", ""),
        ("Digest kvt_x", ""),
        ("", ""),
    ],
)
def test_how_a_token_comes(header: str, token: str) -> None:
    assert token_in(header) == token
