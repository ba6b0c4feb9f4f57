"""Terms of a call: what its keyword arguments say beside the blocks; of reads checked, for both clients."""

from collections.abc import Sequence
from dataclasses import dataclass

from ...v1.arguments import instance, instances, member, text
from ...v1.types import Urgency
from ..values.types import ExpectedBlocks, Retention


@dataclass(slots=True)
class ReadTerms:
    """How a chain is to be read. Raises InvalidRequest for arguments of the wrong type."""

    first_block: int
    session: str
    urgency: Urgency
    deadline_s: float | None
    load_anyway: bool
    retention: Sequence[Retention] = ()
    expected: ExpectedBlocks | None = None

    def __post_init__(self) -> None:
        text("session", self.session)
        member("urgency", self.urgency, Urgency)
        instances("retention", self.retention, Retention)
        if self.expected is not None:
            instance("expected", self.expected, ExpectedBlocks)


@dataclass(slots=True)
class PutTerms:
    """What a put says of its blocks. `put_header` (puts.py) checks it."""

    parent: bytes
    session: str
    deadline_s: float | None
    prefill_s: float
    retention: Sequence[Retention]
