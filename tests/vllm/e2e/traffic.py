"""Conversations as a server sees them, from a seed: shared system prompts, tenants with salts, many turns.

Token ids are random: what text they spell does not matter to a cache, and random prompts share no block by
accident. Lengths are random too, but for one thing: where answers are to be equal bit for bit, no prompt is
a whole number of blocks. Of such a prompt vLLM's own cache computes the last block anew and a connector's
full hit only the last token; both are right, and in bfloat16 they round differently.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from bench.vllm.models import FIRST_TOKEN, VOCABULARY

SALTS = (None, None, "tenant-a", "tenant-b")


@dataclass
class Conversation:
    salt: str | None
    history: list[int]


@dataclass(frozen=True)
class Turn:
    """One request. `conversation` is continued by its answer."""

    conversation: Conversation
    tokens: tuple[int, ...]
    num_new: int

    @property
    def request(self) -> dict[str, object]:
        return {"tokens": list(self.tokens), "num_new": self.num_new, "salt": self.conversation.salt}

    def is_aligned(self, block_tokens: int) -> bool:
        return len(self.tokens) % block_tokens == 0


@dataclass
class Traffic:
    """Draws turns. `max_tokens` bounds prompt and answer together."""

    seed: int
    block_tokens: int
    max_tokens: int
    may_align: bool = True
    max_new: int = 24
    conversations: list[Conversation] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        lengths = [
            self.random.randrange(1, 8) * self.block_tokens + self.random.randrange(40) for _ in range(3)
        ]
        self._systems = [self.words(length) for length in lengths]

    def words(self, num: int) -> list[int]:
        return [self.random.randrange(FIRST_TOKEN, VOCABULARY) for _ in range(num)]

    def turn(self) -> Turn:
        """Draw the next request: a new conversation, or the next turn of one that has room."""
        num_new = self.random.randrange(2, self.max_new)
        question = self.words(self.random.randrange(3, 160))
        conversation = self._conversation(len(question) + num_new + self.block_tokens)
        tokens = conversation.history + question
        if self.may_align and self.random.random() < 0.15:
            tokens += self.words(-len(tokens) % self.block_tokens)
        elif len(tokens) % self.block_tokens == 0:
            tokens += self.words(1)
        return Turn(conversation, tuple(tokens), num_new)

    def answered(self, turn: Turn, answer: tuple[int, ...]) -> None:
        turn.conversation.history = [*turn.tokens, *answer]

    def retire(self, turn: Turn) -> None:
        """Never continue this conversation."""
        self.conversations = [one for one in self.conversations if one is not turn.conversation]

    def resume(self, turn: Turn, answer: tuple[int, ...]) -> None:
        """Continue a conversation that was retired."""
        self.answered(turn, answer)
        self.conversations.append(turn.conversation)

    def _conversation(self, num_needed: int) -> Conversation:
        open_ones = [one for one in self.conversations if len(one.history) + num_needed <= self.max_tokens]
        if open_ones and self.random.random() < 0.7:
            return self.random.choice(open_ones)
        system = self.random.choice(self._systems) if self.random.random() < 0.8 else self.words(40)
        self.conversations.append(Conversation(self.random.choice(SALTS), list(system)))
        return self.conversations[-1]
