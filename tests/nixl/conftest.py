"""Collected only where NIXL is: `make test-nixl`."""

import os

from kvtier.sources.peers.nixl_process import absence

collect_ignore_glob = ["test_*.py"] if absence() else []
os.environ.setdefault("UCX_TLS", "tcp,self")  # else processes of one machine share memory
