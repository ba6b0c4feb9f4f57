"""What `kv_connector_extra_config` may say. Unknown keys and wrong values are refused at the engine's start.

Every time limit here bounds what the engine may lose to a daemon that is slow or gone; only `answer_wait_s`,
a part of a step, is ever waited for inside schedule().
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...v1.addresses import default_target
from ..connector.plugin_options import check_choice, digest_from, options_from

WHAT = "kv_connector_extra_config"
SAVES = ("all", "prompt", "none")
LEAST = {
    **dict.fromkeys(("layers_per_group", "min_load_tokens", "window_checkpoint_tokens"), 0),
    **dict.fromkeys(("answer_wait_s", "max_early_leases", "max_arriving_loads"), 0),
    "lease_ttl_s": 1,
}
MOST = {
    **dict.fromkeys(("answer_timeout_s", "promote_timeout_s", "load_timeout_s", "save_timeout_s"), 600),
    **dict.fromkeys(("handover_wait_s", "lease_ttl_s"), 600),
    "max_unsaved_fraction": 0.9,
    "num_load_threads": 64,
}


@dataclass(frozen=True, slots=True)
class Options:
    """Settings of the connector, equal on both sides. Times in seconds."""

    target: str = ""  # as for Client; empty: KVTIER_TARGET, or the default socket
    domain: str = ""  # isolation domain
    model_digest: str = ""  # hex, 16 to 64 bytes; empty: taken from the checkpoint on disk
    variant: str = ""  # whatever else changes the KV
    save: str = "all"  # or "prompt": no blocks with generated tokens; or "none"
    load: bool = True
    layers_per_group: int = (
        0  # 0: what gives fragments of about 1 MiB; else a divisor of the number of layers
    )
    #: Of sliding windows only those are kept that end at multiples of this, and at a prompt's end. 0: all.
    window_checkpoint_tokens: int = 0
    min_load_tokens: int = 0  # a hit that saves less than this is not loaded
    #: Longest that one step waits for answers, all requests together. An answer takes a fraction of this, and
    #: requests that arrived together then run together, as they would without us.
    answer_wait_s: float = 0.002
    answer_timeout_s: float = 1.0  # until the daemon says how much is stored
    promote_timeout_s: float = 5.0  # until blocks on their way up count as not stored
    load_timeout_s: float = 5.0  # one load of one worker
    handover_wait_s: float = (
        30.0  # until blocks that another engine computes are there (prefill and decode apart)
    )
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
        given = {**extra, "target": extra.get("target") or default_target(environment)}
        options = options_from(cls, given, WHAT, LEAST, MOST)
        check_choice("save", options.save, SAVES)
        if options.model_digest:
            digest_from(options.model_digest, "model_digest")
        return options
