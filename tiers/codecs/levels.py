"""The levels of codec `float8`: (first rank, bits) of those behind the first, two bits from rank 0 on.

Found by trying all of up to six levels of one to three bits on KV of a model trained here, in e4m3:

    2, 1, 1, 1, 2, 2   1.2098 x      2, 1, 2, 2   1.2026 x
    3, 3, 3            1.196 x       Huffman      1.214 x       the exponents' entropy   1.221 x
"""

from typing import Final

LEVELS: Final = ((3, 1), (4, 1), (5, 1), (6, 2), (9, 2))
#: Lowest rank that no level codes: a byte.
FIRST_LITERAL: Final = 12
