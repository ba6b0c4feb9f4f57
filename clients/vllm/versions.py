"""Which versions of vLLM this connector was tested with; others are refused at the engine's start.

The connector API is declared experimental upstream and changed shape between minor versions (constructor,
tensor layout, failure reports). A refusal with a message beats wrong KV. Each entry has a contract test
(tests/vllm/contract) that reads the installed vLLM; a new version is a new entry and a green test run.
"""

import re

from ..errors import PreconditionFailed

SUPPORTED = ("0.32",)


def check_version(version: str) -> str:
    """Return the supported minor version that `version` belongs to. Raises PreconditionFailed."""
    found = re.match(r"(\d+)\.(\d+)", version)
    minor = f"{found[1]}.{found[2]}" if found else version
    if minor not in SUPPORTED:
        raise PreconditionFailed(
            f"the connector was not tested with vLLM {version}, only with {', '.join(SUPPORTED)}.x; "
            "install one of those, or run without kv_connector KvtierConnector",
            reason="UNSUPPORTED_RUNTIME",
        )
    return minor
