"""What `helm test` runs on a node of each group: is the daemon ready, and does it give back what was put?"""

import hashlib
import os
import socket
import urllib.request

import numpy as np

from kvtier.clients import Client, Geometry, NamespaceIdentity, prefix_hashes

NUM_BLOCKS, BLOCK_TOKENS = 4, 16

# By address: the daemon answers no name but its own (a page elsewhere could read it through a browser).
port = os.environ["CHECK_PORT"]
host = socket.getaddrinfo(os.environ["CHECK_HOST"], port, type=socket.SOCK_STREAM)[0][4][0]
host = f"[{host}]" if ":" in str(host) else host
with urllib.request.urlopen(f"http://{host}:{port}/readyz", timeout=10) as answer:
    print(f"readiness: {answer.read().decode().strip()}")

if os.environ.get("CHECK_PUT") == "yes":
    geometry = Geometry(num_layers=2, num_kv_heads=2, head_dim=64, block_tokens=BLOCK_TOKENS, dtype="float16")
    with Client.from_env() as kv:
        ns = kv.register(NamespaceIdentity(hashlib.sha256(b"helm test").digest(), geometry))
        hashes = prefix_hashes(ns, list(range(NUM_BLOCKS * BLOCK_TOKENS)))
        blocks = np.random.default_rng(1).integers(0, 256, (NUM_BLOCKS, ns.block_bytes), np.uint8)
        kv.put(ns, hashes, blocks)
        report = kv.get(ns, hashes, into=np.zeros_like(blocks))
        assert report.num_blocks == NUM_BLOCKS, f"{report.num_blocks} of {NUM_BLOCKS} blocks came back"
        assert np.array_equal(report.data, blocks), "other bytes came back than were put"
    print(f"put and got {NUM_BLOCKS} blocks of {ns.block_bytes} bytes")
else:
    print("put and get: left out, because there are tenants and the check is none of them")
