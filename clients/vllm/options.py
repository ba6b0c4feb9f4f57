"""What `kv_connector_extra_config` may say. Unknown keys and wrong values are refused at the engine's start.

Every time limit here bounds what the engine may lose to a daemon that is slow or gone; only `answer_wait_s`,
a part of a step, is ever waited for inside schedule().
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, get_type_hints

from ...v1.addresses import default_target
from ..errors import InvalidRequest

SAVES = ("all", "prompt", "none")


@dataclass(frozen=True, slots=True)
class Options:
    """Settings of the connector, equal on both sides. Times in seconds."""

    target: str = ""  # as for Client; empty: KVTIER_TARGET, or the default socket
    domain: str = ""  # isolation domain
    model_digest: str = ""  # hex, 16 to 64 bytes; empty: taken from the checkpoint on disk
    save: str = "all"  # or "prompt": no blocks with generated tokens; or "none"
    load: bool = True
    layers_per_group: int = (
        0  # 0: what gives fragments of about 1 MiB; else a divisor of the number of layers
    )
    min_load_tokens: int = 0  # a hit that saves less than this is not loaded
    #: Longest that one step waits for answers, all requests together. An answer takes a fraction of this, and
    #: requests that arrived together then run together, as they would without us.
    answer_wait_s: float = 0.002
    answer_timeout_s: float = 1.0  # until the daemon says how much is stored
    promote_timeout_s: float = 5.0  # until blocks on their way up count as not stored
    load_timeout_s: float = 5.0  # one load of one worker
    save_timeout_s: float = 5.0  # one put
    lease_ttl_s: float = 30.0  # extended while a request waits
    max_early_leases: int = 64  # requests that hold a lease before the scheduler looks at them
    #: Loads that may begin while their blocks are still on their way up from nvme, so that the copy into the
    #: engine overlaps with the reading. They hold blocks of the engine meanwhile. 0: none.
    max_arriving_loads: int = 1
    max_unsaved_fraction: float = 0.5  # of the engine's blocks, held for saves that are under way
    #: Say how long prompts take to compute: the appliance then leaves out what is slower to load.
    report_prefill: bool = True
    num_load_threads: int = 1  # of each worker; one moves what a host's memory can
    staging_bytes: int = 64 << 20  # of each worker

    @classmethod
    def from_config(cls, extra: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> "Options":
        """Read the engine's extra config. Raises InvalidRequest naming the key and the fix."""
        kinds: dict[str, Any] = get_type_hints(cls)
        known = [field.name for field in fields(cls)]
        chosen: dict[str, Any] = {}
        for name, value in extra.items():
            if name not in kinds:
                raise _bad(f"unknown key {name!r}; known are {', '.join(known)}")
            chosen[name] = _converted(name, value, kinds[name])
        chosen["target"] = chosen.get("target") or default_target(environment)
        options = cls(**chosen)
        options._check()
        return options

    def _check(self) -> None:
        if self.save not in SAVES:
            raise _bad(f"save is {self.save!r}; use one of {', '.join(SAVES)}")
        for name in ("answer_timeout_s", "promote_timeout_s", "load_timeout_s", "save_timeout_s"):
            if not 0.0 < float(getattr(self, name)) <= 600.0:
                raise _bad(f"{name} must be above 0 and at most 600 seconds, is {getattr(self, name)}")
        if not 1 <= self.lease_ttl_s <= 600:
            raise _bad(f"lease_ttl_s must be between 1 and 600 seconds, is {self.lease_ttl_s}")
        if not 0 < self.max_unsaved_fraction <= 0.9:
            raise _bad(
                f"max_unsaved_fraction must be above 0 and at most 0.9, is {self.max_unsaved_fraction}"
            )
        if not 1 <= int(self.num_load_threads) <= 64:
            raise _bad(f"num_load_threads must be between 1 and 64, is {self.num_load_threads}")
        try:
            length = len(bytes.fromhex(self.model_digest))
        except ValueError:
            raise _bad(f"model_digest must be hexadecimal, is {self.model_digest!r}") from None
        if self.model_digest and not 16 <= length <= 64:
            raise _bad(f"model_digest must be 16 to 64 bytes in hexadecimal, has {length}")


def _converted(name: str, value: Any, kind: Any) -> Any:
    converted: Any = float(value) if kind is float and type(value) is int else value
    if type(converted) is not kind:
        raise _bad(f"{name} must be {kind.__name__}, is {value!r}")
    if kind in (int, float) and converted < 0:
        raise _bad(f"{name} must not be negative, is {value}")
    return converted


def _bad(message: str) -> InvalidRequest:
    return InvalidRequest(f"kv_connector_extra_config: {message}", reason="BAD_OPTION")
