"""The connector for a vLLM with an interface that does not fit: finds nothing, saves nothing, engine runs.

It imports the base class and nothing else of vLLM, and its hooks take whatever they are passed. The full
connector cannot stand in here: an import that fails, or a hook that is passed something else than it takes,
ends the engine.
"""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)
from vllm.logger import init_logger


class DarkConnector(KVConnectorBase_V1, SupportsHMA):
    """Answers every hook with a miss. `why_dark`, in the log once per process, says why."""

    why_dark = ""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any, *more: Any, **named: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config, *more, **named)
        init_logger("vllm.kvtier").warning("kvtier serves nothing to this engine: %s", self.why_dark)

    @property
    def requires_kv_delivery(self) -> bool:
        """Return False: nothing is delivered."""
        return False

    def get_num_new_matched_tokens(self, *_: Any, **__: Any) -> tuple[int | None, bool]:
        """Return a miss."""
        return 0, False

    def update_state_after_alloc(self, *_: Any, **__: Any) -> None:
        """Do nothing: nothing was promised."""

    def build_connector_meta(self, *_: Any, **__: Any) -> KVConnectorMetadata:
        """Return a plan without loads or saves."""
        return KVConnectorMetadata()

    def request_finished_all_groups(self, *_: Any, **__: Any) -> tuple[bool, dict[str, Any] | None]:
        """Return False: the blocks may be freed."""
        return False, None

    def start_load_kv(self, *_: Any, **__: Any) -> None:
        """Do nothing: no plan has loads."""

    def wait_for_layer_load(self, *_: Any, **__: Any) -> None:
        """Return at once."""

    def save_kv_layer(self, *_: Any, **__: Any) -> None:
        """Save nothing."""

    def wait_for_save(self, *_: Any, **__: Any) -> None:
        """Return at once."""


def dark_connector(why: str) -> type[DarkConnector]:
    """Return a class that can be made in any engine; `why` says what does not fit.

    Hooks that a newer engine demands and that are not known here keep the body of the base class."""
    made = type("KvtierConnector", (DarkConnector,), {"why_dark": why})
    made.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]
    return made
