"""Collected only where Dynamo is: `make test-dynamo`."""

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("dynamo") else ["test_*.py"]
