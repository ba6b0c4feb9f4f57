"""The loops of `planes` for values of two bytes: one pass over memory instead of numpy's five."""

from typing import Any

import numpy as np

from .compiling import compiled


@compiled
def split(words: Any, top: Any, rest: Any) -> Any:
    """Rotate `words` (uint16) left by one bit; their upper bytes go to `top`, the lower ones to `rest`."""
    for place in range(words.size):
        word = words[place]
        top[place] = np.uint8((word >> np.uint16(7)) & np.uint16(0xFF))
        rest[place] = np.uint8(((word << np.uint16(1)) & np.uint16(0xFE)) | (word >> np.uint16(15)))


@compiled
def join(top: Any, rest: Any, words: Any) -> Any:
    """Undo `split`: fill `words`."""
    for place in range(words.size):
        low = np.uint16(rest[place])
        words[place] = (
            (np.uint16(top[place]) << np.uint16(7)) | (low >> np.uint16(1)) | (low << np.uint16(15))
        )
