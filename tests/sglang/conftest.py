"""What needs SGLang is collected only where it is: `make test-sglang`. The rest runs everywhere."""

import importlib.util

from .stub_triton import install, install_tree_stubs

HAS_SGLANG = importlib.util.find_spec("sglang") is not None
collect_ignore = [] if HAS_SGLANG else ["contract"]
if HAS_SGLANG:
    install()
    install_tree_stubs()
