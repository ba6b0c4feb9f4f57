"""What the scheduler's side remembers of one request."""

from dataclasses import dataclass
from typing import Any

from ....v1.types import Tier, Urgency
from ..options import Options
from .handover import HandoverSource
from .lookups import LookupAnswer, LookupRequest, PendingLookup
from .saving import Saving
from .sessions import Turn


@dataclass(slots=True)
class Tracked:
    """One request from its arrival to its end."""

    request: Any
    turn: Turn
    saving: Saving
    source: HandoverSource | None = None  # where its prompt is being computed: waited for, once
    asked: PendingLookup | None = None
    num_questions: int = 0
    polled_at: float | None = None  # when the scheduler first wanted the answer
    given_up: bool = False  # nothing more is loaded for it
    is_loading: bool = False
    promised: LookupAnswer | None = None
    may_be_early: bool = True  # promised before all of it has come up
    is_arriving: bool = False  # such a load is under way
    learned_from: LookupAnswer | None = None
    promised_from: int = 0  # tokens that the engine had when it was told
    adapter: bytes = b""
    urgency: Urgency = Urgency.QUEUED
    num_preemptions: int = 0

    def question(self, options: Options, first_token: int, salt: str, has_states: bool) -> LookupRequest:
        """Return what to ask from `first_token` on.

        What another engine computes is waited for once: what did not come then is computed."""
        request, turn, source = self.request, self.turn, self.source
        self.source = None
        limit_s = options.promote_timeout_s if source is None else options.handover_wait_s
        return LookupRequest(
            turn.session,
            tuple(request.block_hashes),
            first_token,
            getattr(request.lora_request, "lora_path", ""),
            salt,
            min(limit_s, turn.deadline_s or float("inf")),
            getattr(request.lora_request, "lora_int_id", 0),
            turn.retention,
            # The last token is computed in any case, and onto a state only once.
            request.num_tokens - 1 if has_states else request.num_tokens,
            source,
        )

    def num_on_disk(self, num_tokens: int, block_tokens: int) -> int:
        """Return how many of the `num_tokens` tokens from `promised_from` on were found on nvme."""
        if self.promised is None:
            return 0
        first, end = self.promised_from, self.promised_from + num_tokens
        tiers = self.promised.tiers[first // block_tokens : end // block_tokens]
        return sum(tier.label == Tier.NVME.label for tier in tiers) * block_tokens
