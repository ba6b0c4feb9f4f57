"""A connector that can be switched off while the engine runs, so that one engine is compared with itself.

Two engines that are started alike differ by several percent for as long as they live, from where their pages
happened to lie: more than what is to be measured. Here the same engine computes with kvtier and without. Off
means that no hook of kvtier's is run, but those that end what was begun while it was on; what vLLM itself
does because it has some connector (an empty object that travels with every step) goes on.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.vllm.options import SWITCH_VARIABLE
from kvtier.clients.vllm.connector import KvtierConnector
from kvtier.clients.vllm.messages import KvtierMetadata
from kvtier.clients.vllm.plan import StepPlan


class Switch:
    """One byte of a file that all processes of the bench map: 1 is on."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._byte = mmap.mmap(file.fileno(), 1, prot=mmap.PROT_READ)

    @property
    def is_on(self) -> bool:
        return self._byte[0] == 1


def _when_on(hook: Callable[..., Any], otherwise: Callable[[], Any]) -> Callable[..., Any]:
    def switched(self: SwitchedConnector, *arguments: Any, **named: Any) -> Any:
        return hook(self, *arguments, **named) if self.switch.is_on else otherwise()

    return switched


class SwitchedConnector(KvtierConnector):
    """KvtierConnector behind a switch."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self.switch = Switch(Path(os.environ[SWITCH_VARIABLE]))
        super().__init__(*arguments, **named)


DEFAULTS: dict[str, Callable[[], Any]] = {
    "on_new_request": lambda: None,
    "get_num_new_matched_tokens": lambda: (0, False),
    "update_state_after_alloc": lambda: None,
    "get_external_cache_hit_sources": dict,
    "build_connector_meta": lambda: KvtierMetadata(StepPlan()),
    "request_finished": lambda: (False, None),
    "request_finished_all_groups": lambda: (False, None),
    "start_load_kv": lambda: None,
    "wait_for_save": lambda: None,
    "get_kv_connector_stats": lambda: None,
}
for name, default in DEFAULTS.items():
    setattr(SwitchedConnector, name, _when_on(getattr(KvtierConnector, name), default))
