"""The backend on a host with an empty disk: pages that another host stored are found and loaded."""

import hashlib
import shutil
from pathlib import Path
from signal import SIGKILL

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageExtraInfo

from kvtier.clients.sglang import KvtierStorage

from ...daemon import Daemon
from ...e2e.test_shared_store import bundles, host
from ...waiting import until
from .pools import HostPool
from .test_backend import config_of, keys_of

PAGE_TOKENS = 64
BUNDLE_PAGES = 256 // PAGE_TOKENS
STORED = 3 * BUNDLE_PAGES
KEYS = keys_of("prompt", STORED + 1)


def backend_of(daemon: Daemon, pool: HostPool) -> KvtierStorage:
    """Make a backend that is patient: its question is not whether a slow machine is a miss."""
    settings = {
        "target": daemon.target,
        "weights_digest": hashlib.sha256(b"shared").hexdigest(),
        "lookup_timeout_s": 60.0,
        "load_timeout_s": 60.0,
        "store_timeout_s": 60.0,
    }
    backend = KvtierStorage(config_of({"kvtier": settings}))
    backend.register_mem_pool_host(pool)
    return backend


def test_pages_of_a_host_that_is_gone(tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    pools = [HostPool(STORED + 1, page_size=PAGE_TOKENS) for _ in range(2)]
    pools[0].fill(1)
    everything = range(STORED + 1)
    with host(tmp_path / "first", f"file://{store}", "eager") as first:
        one = backend_of(first, pools[0])
        assert all(one.batch_set_v1(KEYS, pools[0].indices(*everything)))
        until(lambda: len(bundles(store)) == STORED // BUNDLE_PAGES)
        one.close()
        first.stop(SIGKILL)
    shutil.rmtree(tmp_path / "first" / "nvme")
    with host(tmp_path / "second", f"file://{store}", "off") as second:
        other = backend_of(second, pools[1])
        until(lambda: other.batch_exists(KEYS) == STORED)
        first_page = BUNDLE_PAGES + 1  # SGLang has those before it itself, and says which
        info = HiCacheStorageExtraInfo(prefix_keys=KEYS[:first_page])
        assert other.batch_exists(KEYS[first_page:], info) == STORED - first_page
        loaded = other.batch_get_v1(KEYS[first_page:], pools[1].indices(*list(everything)[first_page:]), info)
        assert loaded == [True] * (STORED - first_page) + [False]
        assert other.batch_get_v1(KEYS, pools[1].indices(*everything)) == [True] * STORED + [False]
        for page in range(STORED):
            assert torch.equal(pools[0].page(page), pools[1].page(page))
        other.close()
