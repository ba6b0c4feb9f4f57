"""kvtier for TensorRT-LLM: both halves of its KV cache connector. NEVER RAN with TensorRT-LLM itself.

    KvCacheConnectorConfig(connector_module="kvtier.clients.trtllm",
        connector_scheduler_class="KvtierScheduler", connector_worker_class="KvtierWorker")

Written from the published source and tested with a stand-in for it (docs/integrations/tensorrt-llm.md).
Reading order: rank (what is decided and moved, without TensorRT-LLM) · connector (its two classes).
"""

from typing import TYPE_CHECKING

from ...lazy import on_demand

if TYPE_CHECKING:
    from .connector import KvtierScheduler, KvtierWorker

__all__ = ["KvtierScheduler", "KvtierWorker"]

__getattr__ = on_demand(__name__, {".connector": "KvtierScheduler KvtierWorker"})
