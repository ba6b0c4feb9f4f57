"""Namespaces and stored blocks for the threads of the connector, over a FakeAppliance."""

from typing import Any

import numpy as np

from kvtier.clients.vllm.groups import Group
from kvtier.clients.vllm.identity import identity_of
from kvtier.clients.vllm.options import Options
from kvtier.testing import FakeAppliance

from .engine import HASH_TOKENS, LAYERS, PAGE_BYTES, content, hashes_of

WAIT_S = 60.0
GROUPS = [Group(0, 8, 8 // HASH_TOKENS)]
TWO = [*GROUPS, Group(1, 4, 1, window_tokens=10)]
HASHES = tuple(hashes_of(range(48)))
OPTIONS = Options(target="in this process", num_load_threads=1, lease_ttl_s=30.0)


def identities(groups: list[Group], rank: int = 0) -> list[Any]:
    return [
        identity_of(
            bytes(32), LAYERS, PAGE_BYTES, g.block_tokens, (1, 1, "int8"), "t", f"tp={rank},g={g.index}", ""
        )
        for g in groups
    ]


def store(appliance: FakeAppliance, group: Group, num_blocks: int, rank: int = 0) -> None:
    with appliance.client(name="store") as client:
        namespace = client.register(identities(TWO, rank)[group.index])
        names = group.chain(HASHES)[:num_blocks]
        client.put(
            namespace, names, np.concatenate([content(name, group.index).reshape(-1) for name in names])
        )
