"""Lookups without waiting: vLLM asks chunk by chunk inside schedule(), the answers come a step later.

vLLM's own AsyncLookupManager collects the keys of a step, hands them to a thread, and keeps verdicts until
their requests end; all of it is used as it is. What is added: one call to the appliance per request and
cache group instead of one per key, and nothing that the appliance does can keep a verdict from coming.
"""

from collections.abc import Callable, Iterable, Sequence

from vllm.v1.kv_offload.base import OffloadKey, ReqContext
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager

from .runs import is_usable

Probe = Callable[[Sequence[bytes], Callable[[Sequence[bytes]], bool]], set[bytes]]


class TierLookups(AsyncLookupManager):  # type: ignore[misc]
    """Verdicts on keys. `probe` returns which of them are stored; it runs in this object's thread."""

    def __init__(self, tier_type: str, probe: Probe) -> None:
        self._probe = probe
        super().__init__(tier_type)

    def num_asked(self, request: str) -> int:
        """Return how many chunks a request has asked for."""
        return len(self._req_keys.get(request, ()))

    def batch_lookup(self, keys: list[OffloadKey], req_context: ReqContext) -> Iterable[bool]:
        """Answer for the keys of one request, in the order in which the scheduler asked.

        A full-attention group is asked from the start and needs a prefix; a sliding window is asked from the
        end and needs whatever is there.
        """

        def is_descending(asked: Sequence[bytes]) -> bool:
            positions = [req_context.get_offload_key_position(key) for key in asked[:2]]
            return len(positions) < 2 or None in positions or positions[0] > positions[1]

        found = self._probe([key for key in keys if is_usable(key)], is_descending)
        return [key in found for key in keys]
