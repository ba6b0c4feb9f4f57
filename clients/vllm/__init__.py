"""kvtier for vLLM: a KV connector (V1) that keeps the KV of finished blocks in the appliance.

    vllm serve ... --kv-transfer-config '{"kv_connector": "KvtierConnector",
        "kv_connector_module_path": "kvtier.clients.vllm", "kv_role": "kv_both"}'

Only `vllm_tier` imports this package, and of its modules only `connector`, `dark`, `describe`, `engine`,
`metrics` and `scheduler/events` import vLLM: everything that decides is plain Python over duck types, tested
without an engine. Reading order: options, groups, plan (what the two sides tell each other) · scheduler/
(inside schedule(), and its thread) · identity, worker/ (each rank) · counters · connector.
"""

from typing import TYPE_CHECKING, Any

from .versions import why_not_served

if TYPE_CHECKING:
    from .connector import KvtierConnector

__all__ = ["KvtierConnector"]


def __getattr__(name: str) -> Any:
    if name == "KvtierConnector":
        return _fitting_connector()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _fitting_connector() -> type:
    """Return the connector, or one that serves nothing where the installed vLLM's interface does not fit."""
    from vllm import __version__ as version

    try:
        from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1

        from .connector import KvtierConnector

        why = why_not_served(version, KVConnectorBase_V1, KvtierConnector)
    except (ImportError, AttributeError) as problem:  # a name that kvtier uses is gone
        why = f"vLLM {version} lacks what kvtier uses: {problem}"
    if not why:
        return KvtierConnector
    from .dark import dark_connector

    return dark_connector(why)


def register() -> None:
    """Make the connector known to vLLM by name (entry point `vllm.general_plugins`)."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if "KvtierConnector" not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector("KvtierConnector", "kvtier.clients.vllm", "KvtierConnector")
