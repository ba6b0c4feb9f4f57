"""The outbox: instructions of the event that is being handled, in order, notices for routers last."""

from ....tiers.block import Tier
from ..instructions import BlockChange, Instruction, Notify


class Outbox:
    """Collects instructions until `take`. Neighbouring notices of the same kind become one."""

    def __init__(self) -> None:
        self._instructions: list[Instruction] = []
        self._notices: list[Notify] = []
        self._last_subject: tuple[object, ...] | None = None  # what the last notice can be joined with

    def emit(self, instruction: Instruction) -> None:
        """Append an instruction."""
        self._instructions.append(instruction)

    def notify(
        self, change: BlockChange, namespace_id: int, tier: Tier, names: list[bytes], reason: str = ""
    ) -> None:
        """Tell routers what happened to blocks of a namespace, by their prefix hashes. Keeps `names`."""
        subject = (change, namespace_id, tier, reason)
        if self._last_subject == subject:
            self._notices[-1].prefix_hashes += names
        else:
            self._last_subject = subject
            self._notices.append(Notify(change, namespace_id, tier, names, reason))

    def take(self) -> list[Instruction]:
        """Return what has to be done, notices last, and start anew."""
        taken = self._instructions
        taken += self._notices
        self._instructions, self._notices, self._last_subject = [], [], None
        return taken
