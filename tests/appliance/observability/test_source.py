"""What is shown of an object store: in metrics, status and the page's data, of two real daemons."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtier.clients import Client

from ...cli.conftest import run
from .conftest import GEOMETRY, IDENTITY, Shown, Start, names
from .test_metrics import scrape, total

if importlib.util.find_spec("obstore") is None:
    pytest.skip("no object stores: `pip install obstore`", allow_module_level=True)

BUNDLE_BLOCKS = 16
CHAINS = ("a", "b")
PRICE = {"gb_month": 30.0, "thousand_puts": 5.0, "gb_egress": 1.0}


def with_store(folder: Path, **more: object) -> dict[str, Any]:
    """Return arguments of `start`: a store in `folder`, and room for bundles on their way to it."""
    return {"dram": "32MiB", "objects": {"url": f"file://{folder}", "price": PRICE, **more}}


def fill(shown: Shown) -> None:
    """Put chains of one bundle each, and wait until they are stored for others."""
    data = np.random.default_rng(5).integers(0, 256, BUNDLE_BLOCKS * GEOMETRY.block_bytes, np.uint8)
    with Client(shown.target) as client:
        namespace = client.register(IDENTITY)
        for chain in CHAINS:
            assert client.put(namespace, names(chain, BUNDLE_BLOCKS), data).complete
    shown.until(lambda: shown.snapshot()["source"]["exports"]["stored"] == len(CHAINS))


def opened(shown: Shown) -> Shown:
    """Wait until the store is asked."""
    shown.until(lambda: shown.snapshot()["source"]["is_open"])
    return shown


def test_what_goes_to_a_store_is_counted_and_billed(start: Start, tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    shown = opened(start(**with_store(store, share="eager", daily_exports="1GiB")))
    fill(shown)
    sent = sum(path.stat().st_size for path in store.glob("v1/b/*/*/*/*"))
    samples = scrape(shown)
    assert total(samples, "kvtier_source_open") == 1
    assert total(samples, "kvtier_source_requests_total", operation="put", outcome="ok") == len(CHAINS)
    assert total(samples, "kvtier_source_requests_total", operation="head", outcome="missing") > 0
    assert total(samples, "kvtier_source_bytes_total", direction="sent") == sent
    assert total(samples, "kvtier_source_exports_total", outcome="stored") == len(CHAINS)
    assert total(samples, "kvtier_source_seconds_count", work="export") == len(CHAINS)
    num_lists = total(samples, "kvtier_source_requests_total", operation="list")
    bill = {
        reason: total(samples, "kvtier_source_day_dollars", reason=reason) for reason in ("storage", "puts")
    }
    assert bill == pytest.approx(
        {"storage": sent / 1e9 * 30.0 * 3 / 30, "puts": (len(CHAINS) + num_lists) * 5.0 / 1000}
    )
    answer = json.loads(run("status", "--json", target=shown.target).output)["source"]
    assert (answer["is_open"], answer["exports"]["stored"], answer["sent_bytes"]) == (True, 2, sent)
    assert answer["day_dollars"]["storage"] == pytest.approx(bill["storage"])
    text = run("status", target=shown.target).output
    for words in (
        f"object store file://{store}: in use",
        "exports: 2 stored",
        " in 24 h of 1 GiB)",
        "bill of 24 h: $",
    ):
        assert words in text


def test_what_comes_from_a_store_is_counted(start: Start, tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    fill(opened(start(**with_store(store, share="eager"))))
    other = opened(start(**with_store(store)))
    damaged = next(store.glob(f"v1/b/*/*/*/{names('b', BUNDLE_BLOCKS)[-1].hex()}"))
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    with Client(other.target) as client:
        namespace = client.register(IDENTITY)
        assert client.get(namespace, names("a", BUNDLE_BLOCKS)).num_blocks == BUNDLE_BLOCKS
        assert client.get(namespace, names("b", BUNDLE_BLOCKS)).num_blocks < BUNDLE_BLOCKS
    other.until(lambda: other.snapshot()["source"]["fetches"]["wrong_checksum"] == 1)
    samples = scrape(other)
    assert total(samples, "kvtier_source_fetches_total", outcome="arrived") == 1
    assert total(samples, "kvtier_source_fetched_blocks_total") == BUNDLE_BLOCKS
    received = total(samples, "kvtier_source_bytes_total", direction="received")
    assert received >= 2 * BUNDLE_BLOCKS * GEOMETRY.block_bytes
    assert total(samples, "kvtier_source_day_dollars", reason="egress") == pytest.approx(received / 1e9)
    text = run("status", target=other.target).output
    assert "fetches: 1 arrived, 1 wrong checksum" in text


def test_a_store_that_is_not_there_is_shown_with_the_reason(start: Start, tmp_path: Path) -> None:
    shown = start(**with_store(tmp_path / "nothing"))
    shown.until(lambda: shown.snapshot()["source"]["problem"] != "")
    assert total(scrape(shown), "kvtier_source_open") == 0
    assert "does not exist" in shown.snapshot()["source"]["problem"]
    assert "not in use: the bucket or folder does not exist" in run("status", target=shown.target).output


def test_without_a_store_nothing_is_shown(start: Start) -> None:
    shown = start()
    assert shown.snapshot()["source"] is None
    assert "kvtier_source_open" not in scrape(shown)
    assert json.loads(run("status", "--json", target=shown.target).output)["source"]["address"] == ""
    assert "object store" not in run("status", target=shown.target).output
