"""kvtier for vLLM: a KV connector (V1) that keeps the KV of finished blocks in the appliance.

    vllm serve ... --kv-transfer-config '{"kv_connector": "KvtierConnector",
        "kv_connector_module_path": "kvtier.clients.vllm", "kv_role": "kv_both"}'

Only `vllm_tier` imports this package, and of its modules only `connector`, `describe`, `metrics` and
`scheduler/events` import vLLM: everything that decides is plain Python over duck types, tested without an
engine. Reading order: options, groups, plan (what the two sides tell each other) · scheduler/ (inside
schedule(), and its thread) · identity, worker/ (each rank) · counters · connector.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .connector import KvtierConnector

__all__ = ["KvtierConnector"]


def __getattr__(name: str) -> Any:
    if name == "KvtierConnector":
        from .connector import KvtierConnector

        return KvtierConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def register() -> None:
    """Make the connector known to vLLM by name (entry point `vllm.general_plugins`)."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if "KvtierConnector" not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(
            "KvtierConnector", "kvtier.clients.vllm.connector", "KvtierConnector"
        )
