"""kvtier for llama.cpp: a cache for `llama-cpp-python` that outlives the process.

    llm = Llama("model.gguf", n_ctx=16384)
    llm.set_cache(KvtierCache(llm))

A prompt that begins as an earlier one did, in this process, before a restart or in another process of the
host, gets that beginning's state back; LlamaRAMCache and LlamaDiskCache keep whole states of single prompts
instead. A dead, slow or full daemon is a miss and never an exception. See docs/integrations/llama-cpp.md.

llama-server is served by slots.py. llama_cpp is imported when `KvtierCache` is asked for, not with this
package; state.py and slots.py need numpy only.
"""

from typing import TYPE_CHECKING

from ...lazy import on_demand

if TYPE_CHECKING:
    from .cache import KvtierCache
    from .slots import ServerSlots
    from .state import UnsupportedState

__all__ = ["KvtierCache", "ServerSlots", "UnsupportedState"]

__getattr__ = on_demand(
    __name__, {".cache": "KvtierCache", ".slots": "ServerSlots", ".state": "UnsupportedState"}
)
