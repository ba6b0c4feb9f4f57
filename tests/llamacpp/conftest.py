"""What needs llama.cpp is collected only where it is: `make test-llamacpp`. The rest runs everywhere."""

import importlib.util

collect_ignore = [] if importlib.util.find_spec("llama_cpp") else ["test_cache.py"]
