"""Lends memory to a pool until standard input ends: `python -m examples.mooncake_lender MASTER BYTES`."""

import os
import sys

from mooncake.store import MooncakeDistributedStore

if __name__ == "__main__":
    store = MooncakeDistributedStore()
    code = store.setup("127.0.0.1", "P2PHANDSHAKE", int(sys.argv[2]), 16 << 20, "tcp", "", sys.argv[1])
    print(f"setup {code}", flush=True)
    if code == 0:
        sys.stdin.read()
    os._exit(code != 0)
