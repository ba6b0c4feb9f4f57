"""What needs the engine is collected only where the engine is: `make test-vllm`. The rest runs everywhere."""

import importlib.util

collect_ignore = [] if importlib.util.find_spec("vllm") else ["e2e", "contract", "tier"]
