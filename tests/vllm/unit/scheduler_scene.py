"""The scheduler's half of the connector with a clock and an agent that the test drives."""

from collections.abc import Sequence
from typing import Any

from kvtier.clients import Tier
from kvtier.clients.vllm.counters import Counters
from kvtier.clients.vllm.groups import Group
from kvtier.clients.vllm.options import Options
from kvtier.clients.vllm.plan import StepPlan
from kvtier.clients.vllm.scheduler.lookups import LookupAnswer, LookupRequest, PendingLookup, SessionUpdate
from kvtier.clients.vllm.scheduler.saving import Saver
from kvtier.clients.vllm.scheduler.side import SchedulerSide

from .engine import HASH_TOKENS, Request

GROUPS = [Group(0, 8, 8 // HASH_TOKENS)]
WINDOWED = [GROUPS[0], Group(1, 4, 1, window_tokens=10)]
MISS, PENDING = (0, False), (None, False)


class LookupAgent:
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.asked: list[PendingLookup] = []
        self.released: list[PendingLookup] = []
        self.told: list[tuple[str, SessionUpdate]] = []
        self.answers_while_waited_for: dict[int, tuple[LookupAnswer | None, float]] = {}
        self.is_open = False
        self.num_silent = 0

    def allows(self) -> bool:
        return not self.is_open

    def ask(self, question: LookupRequest) -> PendingLookup:
        self.asked.append(PendingLookup(question, clock.now))
        return self.asked[-1]

    def wait(self, asked: PendingLookup, timeout_s: float) -> None:
        """Time passes until the answer comes, if it comes."""
        answer, needs_s = self.answers_while_waited_for.pop(id(asked), (None, timeout_s))
        clock.now += min(needs_s, timeout_s)
        if needs_s <= timeout_s:
            asked.answer = answer

    def silent(self) -> None:
        self.num_silent += 1

    def release(self, asked: PendingLookup) -> None:
        assert asked not in self.released
        self.released.append(asked)

    def tell(self, session: str, word: SessionUpdate) -> None:
        self.told.append((session, word))

    def where(self, salt: str, adapter: bytes) -> tuple[int, bytes] | None:
        return 7, bytes(32)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


clock = Clock()


class Held:
    """saving.Holder."""

    def __init__(self) -> None:
        self.blocks: list[int] = []
        self.local: set[bytes] = set()  # names of blocks in the engine's own cache

    def hold(self, block_ids: Sequence[int]) -> None:
        self.blocks += block_ids

    def free(self, block_ids: Sequence[int]) -> None:
        for block in block_ids:
            self.blocks.remove(block)

    def has(self, name: bytes) -> bool:
        return name in self.local


class Scene:
    def __init__(self, groups: list[Group] = GROUPS, num_ranks: int = 1, **options: Any) -> None:
        clock.now = 0.0
        self.agent, self.held, self.counters = LookupAgent(), Held(), Counters()
        saver = Saver(groups, num_ranks, 20, self.held, self.counters)
        self.side = SchedulerSide(
            Options(target="x", **options), groups, self.agent, saver, self.counters, engine="e", clock=clock
        )

    def plan(self, request: Request, num_tokens: int, *tables: list[int]) -> StepPlan:
        plan = StepPlan()
        self.side.plan(plan, {request.request_id: num_tokens}, lambda _: tables)
        assert self.side.check_integrity() == []
        return plan


def request(num_tokens: int = 40, name: str = "r") -> Request:
    return Request(name, list(range(num_tokens)), num_tokens)


def hit(num_tokens: int, *stored: int, tiers: tuple[Tier, ...] = ()) -> LookupAnswer:
    return LookupAnswer(num_tokens, stored or (num_tokens // 8,), tiers or (Tier.DRAM,) * (num_tokens // 8))


def loading(scene: Scene, answer: LookupAnswer) -> Request:
    """Return a request whose load has begun."""
    one = request()
    scene.side.arrived(one)
    scene.agent.asked[0].answer = answer
    scene.side.matched_tokens(one, 0)
    scene.side.allocated(one, ([1, 2, 3, 4, 5],), 40)
    return one
