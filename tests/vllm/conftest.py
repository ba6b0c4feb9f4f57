"""What needs the engine is collected only where the engine is: `make test-vllm`. The rest runs everywhere."""

import importlib.util
import os
from importlib import metadata

from kvtier.clients.connector.versions import SUPPORTED

NEED_ENGINE = ["e2e", "contract", "tier", "features"]
collect_ignore = NEED_ENGINE
if importlib.util.find_spec("vllm"):
    of_tier = tuple(f"{version}." for version in SUPPORTED["vLLM"])  # the tier's interface came with it
    collect_ignore = [] if metadata.version("vllm").startswith(of_tier) else ["tier"]
    if os.environ.get("KVTIER_MATRIX") != "1":  # minutes: `make test-matrix`
        collect_ignore.append("features")
