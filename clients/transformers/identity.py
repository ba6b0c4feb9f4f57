"""Identity of a model: a digest of everything that its keys and values depend on besides the tokens.

Taken over the weights as they lie in memory, not over the files they came from: a fine-tuned, merged, cast
or quantised model is another one, whatever its name says, and a name (or a hub revision) cannot tell. The
price is one SHA-256 over the weights, on all cores, when the store is made; `fingerprint` notices later
changes in microseconds, so that it is paid again only when a weight was written to. Sampling the weights
was rejected: an edit of a single matrix row must not keep the old name.
"""

import hashlib
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from transformers import __version__

from .probe import Unsupported

# Of the configuration: names, versions and habits of generating, which change no key and no value.
VOLATILE = ("_name_or_path", "transformers_version", "architectures", "use_cache", "dtype", "torch_dtype")
CHUNK_BYTES = 64 << 20  # of one weight, on its way from a device


def fingerprint(model: Any) -> int:
    """Return a number that changes when a weight is replaced or written to in place. Reads no weight.

    torch counts in-place writes to a tensor; those through `.data` are not counted.
    """
    return hash(
        (
            _configuration(model),
            *((name, one.data_ptr(), one._version, one.dtype) for name, one in model.named_parameters()),
            *((name, one.data_ptr(), one.dtype) for name, one in model.named_buffers()),
        )
    )


def has_adapter(model: Any) -> bool:
    """Whether PEFT has put adapters into the model, which may write no weight."""
    if getattr(model, "_hf_peft_config_loaded", False):
        return True
    if (peft := sys.modules.get("peft")) is None:  # never imported: there is none
        return False
    kinds = (peft.PeftModel, peft.tuners.tuners_utils.BaseTunerLayer)
    return any(isinstance(module, kinds) for module in model.modules())


def model_digest(model: Any, weights_digest: bytes = b"") -> bytes:
    """Return 32 bytes: SHA-256 over the code's version, configuration, device and weights.

    `weights_digest` replaces reading the weights, where their owner knows one. Raises Unsupported when the
    weights are not in memory.
    """
    weights = weights_digest or _weights_digest(model)
    code = f"{type(model).__qualname__} {'.'.join(__version__.split('.')[:2])} {model.device.type}"
    parts = [code.encode(), _configuration(model).encode(), weights]
    return hashlib.sha256(b"".join(len(part).to_bytes(8, "big") + part for part in parts)).digest()


def _configuration(model: Any) -> str:
    attention = getattr(model.config, "_attn_implementation", "")
    return json.dumps([_without_volatile(model.config.to_dict()), attention], sort_keys=True, default=str)


def _without_volatile(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _without_volatile(one) for key, one in value.items() if key not in VOLATILE}
    return value


def _weights_digest(model: Any) -> bytes:
    state = sorted(model.state_dict().items())
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:  # hashlib releases the GIL
        digests = list(pool.map(_tensor_digest, (name for name, _ in state), (one for _, one in state)))
    return hashlib.sha256(b"".join(digests)).digest()


def _tensor_digest(name: str, tensor: Any) -> bytes:
    if not isinstance(tensor, torch.Tensor):
        return hashlib.sha256(f"{name}={tensor!r}".encode()).digest()
    if tensor.device.type == "meta":
        raise Unsupported(f"weight {name!r} is not in memory; pass weights_digest")
    digest = hashlib.sha256(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
    flat = tensor.detach().contiguous().reshape(-1)
    step = max(1, CHUNK_BYTES // max(1, tensor.element_size()))
    for first in range(0, flat.numel(), step):
        digest.update(flat[first : first + step].cpu().view(torch.uint8).numpy().data)
    return digest.digest()
