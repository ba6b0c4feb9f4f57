"""Which bytes may meet: the namespaces of a tier, from what vLLM tells a tier about itself.

vLLM's key covers tokens, salt, adapter name and images. It does not cover the model, its weights, the KV
dtype, the parallelism, the chunk or the layout of a row of the primary pool, so all of that is in the
namespace, and any difference is another namespace, never a wrong byte. What vLLM does not tell a tier
(overrides of the model's config, quantization at load time) cannot be covered here: name it in the option
`variant`.

Nothing of vLLM is imported; an OffloadingConfig is recognised by its fields.
"""

import json
import platform
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ...v1.types import NamespaceIdentity
from ..connector.opaque import opaque_identity
from ..connector.plugin_options import bad_option
from ..connector.versions import check_version
from ..errors import InvalidRequest
from ..vllm.identity import length_choices
from .options import TierOptions

FORMAT = 1  # of a row as a block; raise it when the same bytes would mean something else


@dataclass(frozen=True, slots=True)
class TierIdentity:
    """What every namespace of one tier shares. `chunk_tokens` is per cache group."""

    weights: bytes
    facts: dict[str, Any]
    row_bytes: int
    chunk_tokens: dict[int, int]
    epoch: str = ""  # of this engine, once its cache was reset: nothing from before is found again

    def namespace(self, group: int) -> NamespaceIdentity:
        """Return the identity of the namespace that holds one cache group's chunks."""
        facts = {**self.facts, "epoch": self.epoch}
        parallel = self.facts["parallel"]
        return opaque_identity(
            self.weights,
            self.row_bytes,
            self.chunk_tokens.get(group, 1),
            f"vllm-tier.{FORMAT}",
            facts,
            shard=f"tp={parallel['tp_size']},pp={parallel['pp_size']},group={group}",
        )


def identity_of(
    config: Any, row_bytes: int, options: TierOptions, vllm_version: str, device: str
) -> TierIdentity:
    """Return the identity for an OffloadingConfig. Reads the weights unless their digest was given.

    `device` names the kind of device and, where it shapes the KV, its instruction set. Raises InvalidRequest
    when the weights are not found, PreconditionFailed for a version of vLLM that was never tested.
    """
    check_version("vLLM", vllm_version)
    if not options.variant and length_choices(_config_of(config.model.name, options), 0):
        raise bad_option(
            f"the KV of {config.model.name} depends on --max-model-len, which vLLM does not tell a tier: "
            "name it in `variant`, the same for engines that share"
        )
    facts = {
        "format": FORMAT,
        "engine": ".".join(vllm_version.split(".")[:2]),
        "device": device,
        "dtype": config.model.dtype,
        "layout": config.kv_cache_layout,
        "canonical": config.canonical_layout,
        "replicated": config.replicated_layout,
        "row_bytes": row_bytes,
        "tokens_per_hash": config.cache.tokens_per_hash,
        "blocks_per_chunk": config.cache.blocks_per_chunk,
        "groups": [
            [group.group_id, group.tokens_per_block, list(group.layer_names)] for group in config.groups
        ],
        "parallel": _parallel(config),
        "variant": options.variant,
    }
    chunk_tokens = {
        group.group_id: group.tokens_per_block * config.cache.blocks_per_chunk for group in config.groups
    }
    return TierIdentity(options.weights_of(config.model.name), facts, row_bytes, chunk_tokens)


def host_device(kind: str, instructions: str = "") -> str:
    """Return how a device is named in a namespace. A CPU's KV is packed for its instruction set."""
    return f"cpu:{platform.machine()}:{instructions}" if kind == "cpu" else kind


def _config_of(model: str, options: TierOptions) -> Any:
    """Return the configuration of a checkpoint; empty where it is not on this host."""
    with suppress(InvalidRequest, OSError, ValueError):
        return json.loads((options.folder_of(model) / "config.json").read_text())
    return {}


def _parallel(config: Any) -> dict[str, int]:
    """Return the sizes that shape a row: all 1 where vLLM says that its bytes do not depend on them."""
    names = ("world_size", "tp_size", "pp_size", "pcp_size", "dcp_size")
    if config.parallel.is_parallelism_agnostic or config.replicated_layout:
        return dict.fromkeys(names, 1)
    return {name: int(getattr(config.parallel, name)) for name in names}
