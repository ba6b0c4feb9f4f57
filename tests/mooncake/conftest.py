"""Collected only where Mooncake is: `make test-mooncake`."""

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("mooncake") else ["test_*.py"]
