"""The fixture that tests of more than one file use."""

from typing import Any

import pytest
from vllm.v1.core.block_pool import BlockPool

from kvtier.clients import Geometry, NamespaceIdentity
from kvtier.clients.vllm import connector as module
from kvtier.clients.vllm.messages import KvtierHandshake

from .connector_scene import BLOCK, LookupAgent, make


@pytest.fixture
def ready(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, LookupAgent, BlockPool]:
    """A connector on the scheduler's side after the handshake with two ranks, its block pool bound."""
    agent = LookupAgent()
    monkeypatch.setattr(module, "Agent", lambda *arguments, **named: agent)
    connector = make()
    connector._has_listeners = True
    pool = BlockPool(num_gpu_blocks=16, enable_caching=True, hash_block_size=BLOCK)
    connector.bind_gpu_block_pool(pool)
    geometry = Geometry(1, 2, 64, BLOCK, "float32")
    connector.set_xfer_handshake_metadata_pp_aware(
        {
            (0, rank): KvtierHandshake([NamespaceIdentity(bytes(32), geometry, shard=str(rank))])
            for rank in (0, 1)
        }
    )
    return connector, agent, pool
