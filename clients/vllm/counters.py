"""Counters of the connector: flat names, numbers only, added up over ranks and steps.

One dict for both sides, because the engine merges what the two report into one object per step. Names and
meanings are here; metrics.py turns them into Prometheus counters.
"""

import threading

NAMES: dict[str, str] = {
    "lookups": "Requests with a prefix that was asked for.",
    "lookups_crowded": "Lookups that had to wait for others of this engine to let go.",
    "hits": "Requests that load at least one block.",
    "hits_early": "Those of them that were promised while blocks were still on their way up.",
    "handovers": "Requests that load what another engine has computed, or is computing, for them.",
    "handovers_refused": "Requests with a kvtier_source that names other blocks, or is another connector's.",
    "hit_tokens_host": "Tokens promised to the engine from memory.",
    "hit_tokens_disk": "Tokens promised to the engine that came from nvme.",
    "misses_nothing_stored": "Lookups that found nothing beyond the engine's own cache.",
    "misses_timeout": "Lookups without an answer in time.",
    "misses_error": "Lookups that failed.",
    "misses_adapter_changed": "Requests of an adapter with a folder that was rewritten since it was loaded.",
    "misses_breaker": "Requests not asked for, because the appliance does not answer.",
    "misses_load_failed": "Requests recomputed because a load failed.",
    "leases_lost": "Leases that ended while their request waited.",
    "loads": "Loads finished by workers.",
    "load_failures": "Loads of workers that failed.",
    "load_blocks": "Blocks copied into the engine.",
    "load_bytes": "Bytes copied into the engine.",
    "load_seconds": "Time spent in loads.",
    "saves": "Saves finished by workers.",
    "save_failures": "Saves of workers that failed.",
    "save_blocks": "Blocks named in saves.",
    "save_blocks_stored": "Blocks of which the bytes were taken.",
    "save_blocks_deduplicated": "Blocks that were stored before.",
    "save_blocks_refused": "Blocks that were not stored.",
    "save_bytes": "Bytes named in saves.",
    "save_seconds": "Time spent in saves.",
    "saves_skipped_backpressure": "Blocks not saved: too many are under way.",
    "saves_skipped_breaker": "Blocks not saved: the appliance does not answer.",
    "saves_skipped_gap": "Blocks not saved: a block before them is gone.",
    "breaker_openings": "Times that the connector stopped asking.",
    "hints_ignored": "Actions of kv_hints that were not understood.",
    "hook_errors": "Exceptions caught in a hook of the engine.",
}


class Counters:
    """Numbers by name since the last `take`. Thread-safe."""

    def __init__(self) -> None:
        self._values: dict[str, float] = {}
        self._lock = threading.Lock()

    def add(self, name: str, amount: float = 1) -> None:
        """Count. `name` must be in NAMES."""
        assert name in NAMES, name
        if amount:
            with self._lock:
                self._values[name] = self._values.get(name, 0) + amount

    def take(self) -> dict[str, float]:
        """Return what was counted since the last call."""
        with self._lock:
            values, self._values = self._values, {}
        return values
