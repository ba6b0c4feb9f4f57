"""`kvtier doctor` on an object store: it tries one that answers rightly and ones that do not."""

import importlib.util
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvtier.clients import Client, Geometry, NamespaceIdentity
from kvtier.clients.values.types import PrefillSpeed
from tests.appliance.conftest import small_settings
from tests.appliance.loops import DaemonThread
from tests.sources.objects.s3_server import S3Answer, S3Request, S3Server, error

from .conftest import run

if importlib.util.find_spec("obstore") is None:
    pytest.skip("no object stores: `pip install obstore`", allow_module_level=True)

URL = "s3://bucket/fleet"


def checks(url: str, folder: Path) -> dict[str, dict[str, Any]]:
    """Return what the doctor says about the store, by name."""
    result = run("doctor", "--json", "--set", f"object.url={url}", target=f"unix://{folder}/k.sock")
    found = [one for one in json.loads(result.stdout)["checks"] if one["name"].startswith("object store")]
    assert result.exit_code == 1 or all(one["verdict"] != "fail" for one in found)
    return {one["name"]: one for one in found}


def test_a_folder_that_does_everything_is_ok_and_as_empty_as_before(tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    [found] = checks(f"file://{store}", tmp_path).values()
    assert found["verdict"] == "ok"
    names = ("list", "create only", "ranges", "copy inside", "clock", "delete")
    assert all(name in found["detail"] for name in names)
    assert not [path for path in store.rglob("*") if path.is_file()]


def test_without_a_store_nothing_is_said(tmp_path: Path) -> None:
    assert not checks("", tmp_path)


def test_a_folder_that_is_missing_fails(tmp_path: Path) -> None:
    [found] = checks(f"file://{tmp_path}/none", tmp_path).values()
    assert (found["verdict"], found["setting"]) == ("fail", "object.url")
    assert "create it, or correct the address" in found["detail"]


def replaces(server: S3Server) -> None:
    """Ignore If-None-Match."""

    def change(request: S3Request, answer: S3Answer) -> S3Answer:
        return S3Answer(200, b"", {"ETag": '"x"'}) if answer.status == 412 else answer

    server.change = change


def no_bucket(server: S3Server) -> None:
    server.has_bucket = False


def refusing(operation: str, answer: S3Answer) -> Callable[[S3Server], None]:
    """Return what makes a server refuse one operation."""

    def spoil(server: S3Server) -> None:
        server.refuse = lambda request: answer if request.operation == operation else None

    return spoil


def days_off(server: S3Server) -> None:
    server.clock_s = lambda: time.time() - 3 * 86_400


def whole_objects(server: S3Server) -> None:
    """Ignore Range: what is sent is the object from its start."""

    def change(request: S3Request, answer: S3Answer) -> S3Answer:
        if request.operation != "get" or answer.status != 206:
            return answer
        return S3Answer(200, server.objects[request.key].data, answer.headers)

    server.change = change


def lagging(server: S3Server) -> None:
    empty = S3Answer(200, b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>")
    server.change = lambda request, answer: empty if request.operation == "list" else answer


MISTAKES: dict[str, tuple[Callable[[S3Server], None], str, str, str]] = {
    "replaces": (replaces, "create only", "fail", "ignores If-None-Match"),
    "bucket": (no_bucket, "", "fail", "create it, or correct the address"),
    "denied": (refusing("put", error(403, "AccessDenied")), "create", "fail", "refuses these credentials"),
    "full": (refusing("put", error(403, "QuotaExceeded")), "create", "fail", "takes no more bytes"),
    "list denied": (refusing("list", error(403, "AccessDenied")), "", "fail", "refuses these credentials"),
    "delete": (refusing("delete", error(403, "AccessDenied")), "delete", "fail", "refuses these credentials"),
    "copy": (refusing("copy", error(501, "NotImplemented")), "copy inside", "warn", "does not support"),
    "range": (whole_objects, "ranges", "fail", ""),
    "clock": (days_off, "clock", "fail", "72.0 hours ahead of the store's"),
    "lagging": (lagging, "listed at once", "warn", "found later"),
    "lifecycle": (lambda server: None, "lifecycle", "warn", "dead epochs stay for ever"),
    "plain": (lambda server: None, "protection", "warn", "put other bytes in its place"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_what_a_store_cannot_do_is_named_with_its_fix(case: str, server: S3Server, tmp_path: Path) -> None:
    spoil, name, verdict, words = MISTAKES[case]
    spoil(server)
    found = checks(URL, tmp_path)
    check = found[f"object store, {name}" if name else "object store"]
    assert check["verdict"] == verdict
    assert words in check["detail"]
    assert check["fix"]
    assert "secret" not in json.dumps(found)


def test_it_says_from_geometry_and_prefill_where_a_store_does_not_pay(tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    price = {"thousand_puts": 0.1, "thousand_gets": 0.04, "gpu_hour": 2.5}
    url = f"file://{store}"
    settings = small_settings(tmp_path, object={"url": url, "price": price}, observe={"http": "off"})
    geometry = Geometry(4, 2, 16, 64, "float16", layers_per_group=2)
    speeds = {b"a": 1000.0, b"b": 2000.0, b"c": 1e8, b"d": None}
    with DaemonThread(settings), Client(settings.listen[0]) as client:
        ids = {}
        for model, tokens_per_s in speeds.items():
            prefill = None if tokens_per_s is None else PrefillSpeed(tokens_per_s)
            ids[model] = client.register(NamespaceIdentity(model * 32, geometry), prefill).id
        found = checks(url, tmp_path)
    said = {one["name"]: (one["verdict"], one["detail"]) for one in found.values()}
    expected = {
        b"a": ("ok", "storing it pays with use 2 in three days"),
        b"b": ("warn", "a fetch costs more than it saves"),
        b"c": ("warn", "to fetch and"),
    }
    for model, (verdict, words) in expected.items():
        found_verdict, detail = said.pop(f"object store, namespace {ids[model]}")
        assert found_verdict == verdict
        assert words in detail
    assert list(said) == ["object store"], "of one namespace the speed of prefill is not known"
