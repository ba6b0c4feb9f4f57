"""What to load and what to store, decided over counts alone: no tensors, no daemon, no clock.

Layers of one model may reach differently far back. A layer with full attention needs every token before the
point where computing resumes; a sliding-window layer needs the last `window_tokens` before it and no others.
Layers of one shape and one reach are a `LayerKind`, and each kind has a namespace of its own: one namespace
for all was rejected, because then a hybrid model would have to store (and load) for its sliding layers what
no resumption ever reads, or keep windows per prompt, which share nothing.

So a prompt can be resumed after block `end` when every kind has what it needs there; `resume_point` finds
the largest such `end`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

Stored = Callable[[int, int, int], int]  # (kind, first block, end block) -> blocks stored from the first on
MAX_ATTEMPTS = 32  # a window that is missing here may be there further back; this many places are tried


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Layers with keys and values of one shape and one reach."""

    layers: tuple[int, ...]  # indices in the model's cache
    num_kv_heads: int
    key_dim: int  # of one head
    value_dim: int  # differs from key_dim where a joint latent is kept (MLA)
    dtype: str  # as Geometry spells it
    window_tokens: int = 0  # tokens before the resume point that are needed; 0: all

    def first_needed(self, end_block: int, block_tokens: int) -> int:
        """Return the first block that resuming after `end_block` blocks needs."""
        if not self.window_tokens:
            return 0
        return max(0, end_block * block_tokens - self.window_tokens) // block_tokens


@dataclass(frozen=True, slots=True)
class Saved:
    """What became of a save, in blocks (of one row and one layer kind each)."""

    num_stored: int = 0
    num_deduplicated: int = 0  # were stored before
    num_refused: int = 0  # no room
    why_not: str = ""  # why nothing was tried


def whole_blocks(num_tokens: int, block_tokens: int, align_tokens: int) -> int:
    """Return how many blocks of a prompt may come from a store.

    Its last token never does: the logits after it must be computed. `align_tokens` is a multiple of
    `block_tokens`; resuming happens at multiples of it only.
    """
    return max(0, num_tokens - 1) // align_tokens * align_tokens // block_tokens


def resume_point(
    kinds: Sequence[LayerKind], num_blocks: int, block_tokens: int, align_tokens: int, stored: Stored
) -> int:
    """Return after how many of the first `num_blocks` blocks a prompt can be resumed; 0: not at all."""
    align_blocks = align_tokens // block_tokens
    end = num_blocks // align_blocks * align_blocks
    for number, kind in enumerate(kinds):
        if end and not kind.window_tokens:
            end = stored(number, 0, end) // align_blocks * align_blocks
    for _ in range(MAX_ATTEMPTS):
        if not end:
            return 0
        reached = min(_windows_end(kinds, end, block_tokens, stored), end)
        if reached == end:
            return end
        end = reached // align_blocks * align_blocks
    return 0


def _windows_end(kinds: Sequence[LayerKind], end: int, block_tokens: int, stored: Stored) -> int:
    """Return `end` when all windows before it are stored, else how far one of them reaches."""
    for number, kind in enumerate(kinds):
        if kind.window_tokens:
            first = kind.first_needed(end, block_tokens)
            reached = first + stored(number, first, end)
            if reached < end:
                return reached
    return end
