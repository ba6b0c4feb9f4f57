"""kvtier for Hugging Face transformers: two lines in a generate loop.

    store = PrefixStore(model)                                    # once, beside the model

    cache = store.load(input_ids, session="anna")                 # 1: the longest stored prefix, loaded
    output = model.generate(input_ids, past_key_values=cache)
    cache.save()                                                  # 2: what is new, stored

A dead, slow or full daemon is a miss and never an exception. What cannot be served is refused when the store
is made, with the reason; prompts that cannot be served (padding, images, adapters) are computed as if there
were no store. See docs/integrations/transformers.md.

torch and transformers are imported when `PrefixStore` is asked for, not with this package: its pure part
(plan.py) is used and tested without them.
"""

from typing import TYPE_CHECKING

from ...lazy import on_demand

if TYPE_CHECKING:
    from .cache import Reuse, TieredCache
    from .plan import Saved
    from .probe import Unsupported
    from .store import PrefixStore

__all__ = ["PrefixStore", "Reuse", "Saved", "TieredCache", "Unsupported"]

__getattr__ = on_demand(
    __name__,
    {".cache": "Reuse TieredCache", ".plan": "Saved", ".probe": "Unsupported", ".store": "PrefixStore"},
)
