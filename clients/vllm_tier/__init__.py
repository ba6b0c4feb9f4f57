"""kvtier as the tier below vLLM's own offloading: vLLM copies between GPU and host, kvtier keeps what does
not fit.

vLLM 0.32 moves blocks to a pool in host memory (TieringOffloadingSpec) and from there to secondary tiers.
Of those in the tree, `fs` writes files without limit, eviction or checksum. `KvtierTier` puts an appliance
there instead: bounded, evicting by value, checksummed, surviving crashes, shared by all engines of the
host.

    --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
      "kv_connector_extra_config": {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 8589934592,
        "secondary_tiers": [{"type": "KvtierTier", "module_path": "kvtier.clients.vllm_tier"}]}}'

This is the second way into vLLM. The first, kvtier.clients.vllm, is a connector of its own without a
second copy in host memory, and with leases, sessions and urgency; this one is less code in the engine and
follows vLLM's.

Reading order: options, identity (what may be shared) · runs, transfers, lanes (what is done, without vLLM)
· lookups, manager (vLLM's interface). Only the last two import vllm.
"""

from typing import TYPE_CHECKING

from ...lazy import on_demand

if TYPE_CHECKING:
    from .manager import KvtierTier

__all__ = ["KvtierTier"]

__getattr__ = on_demand(__name__, {".manager": "KvtierTier"})
