"""The prompts of `bench.object_store_peer`: both interpreters import this, so numpy is all that it needs."""

import numpy as np
import numpy.typing as npt

#: A model of 7 billion parameters with four KV heads: 56 KiB a token in bfloat16.
NUM_LAYERS, NUM_HEADS, HEAD_DIM = 28, 4, 128
TOKEN_BYTES = 2 * NUM_LAYERS * NUM_HEADS * HEAD_DIM * 2
CHUNK_TOKENS = 256  # LMCache's default; a bundle of kvtier's holds as many


def payload(num_tokens: int) -> npt.NDArray[np.int16]:
    """Return KV of a prompt, (num_tokens x TOKEN_BYTES / 2,) int16: random, so that no codec helps."""
    random = np.random.default_rng(num_tokens)
    return random.integers(-(1 << 15), 1 << 15, num_tokens * TOKEN_BYTES // 2, np.int16)
