"""The shortest use of kvtier: put two blocks, get them back.

Start a daemon first (`kvtier serve`), then `python -m examples.quickstart`, with its address in
KVTIER_TARGET when it is not the usual one.
"""

import hashlib

import numpy as np

from kvtier.clients import Client, Geometry, NamespaceIdentity, prefix_hashes

geometry = Geometry(num_layers=4, num_kv_heads=2, head_dim=64, block_tokens=16, dtype="float16")
weights_digest = hashlib.sha256(b"the digest of your model's weights").digest()
tokens = list(range(32))  # two blocks of 16

with Client.from_env() as kv:
    ns = kv.register(NamespaceIdentity(weights_digest, geometry))
    hashes = prefix_hashes(ns, tokens)
    blocks = np.random.default_rng(1).integers(0, 256, (2, ns.block_bytes), np.uint8)
    print(kv.put(ns, hashes, blocks))
    print(kv.lookup(ns, hashes))
    report = kv.get(ns, hashes, into=np.empty_like(blocks))
    print(f"{report.num_blocks} blocks back, identical: {np.array_equal(report.data, blocks)}")
