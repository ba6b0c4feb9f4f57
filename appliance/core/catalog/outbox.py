"""The outbox: instructions of the event that is being handled, in order, notices for routers last."""

from ....tiers.block import Tier
from ..instructions import BlockChange, Instruction, Notify
from .catalog import Catalog


class Outbox:
    """Collects instructions until `take`. Neighbouring notices of the same kind become one."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._instructions: list[Instruction] = []
        self._notices: list[Notify] = []
        self._last_subject: tuple[object, ...] | None = None  # what the last notice can be joined with

    def emit(self, instruction: Instruction) -> None:
        """Append an instruction."""
        self._instructions.append(instruction)

    def notify(self, change: BlockChange, row: int, tier: Tier, reason: str = "") -> None:
        """Tell routers what happened to a block."""
        namespace_id = self._catalog.namespace_id[row]
        subject = (change, namespace_id, tier, reason)
        if self._last_subject != subject:
            self._last_subject = subject
            self._notices.append(Notify(change, namespace_id, tier, [], reason))
        self._notices[-1].prefix_hashes.append(self._catalog.prefix_hash[row])

    def notify_removed(self, namespace_id: int, tier: Tier, reason: str, names: list[bytes]) -> None:
        """Tell routers that blocks left a tier, together with those just before them when they can be."""
        subject = (BlockChange.REMOVED, namespace_id, tier, reason)
        if self._last_subject == subject:
            self._notices[-1].prefix_hashes += names
        else:
            self._last_subject = subject
            self._notices.append(Notify(BlockChange.REMOVED, namespace_id, tier, names, reason))

    def add_notice(self, notice: Notify) -> None:
        """Tell routers about several blocks at once."""
        self._notices.append(notice)
        self._last_subject = None

    def take(self) -> list[Instruction]:
        """Return what has to be done, notices last, and start anew."""
        taken = self._instructions
        taken += self._notices
        self._instructions, self._notices, self._last_subject = [], [], None
        return taken
