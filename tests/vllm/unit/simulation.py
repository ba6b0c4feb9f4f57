"""One engine step after another, with the connector's two halves in it and a FakeAppliance behind it."""

import asyncio
import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

from kvtier.clients import AsyncClient
from kvtier.clients.errors import KvtierError
from kvtier.clients.vllm.counters import Counters
from kvtier.clients.vllm.groups import NULL_BLOCK, Group
from kvtier.clients.vllm.identity import identity_of, salted
from kvtier.clients.vllm.options import Options
from kvtier.clients.vllm.plan import Acks, StepPlan
from kvtier.clients.vllm.scheduler.finding import Finder, FoundPrefix
from kvtier.clients.vllm.scheduler.lookups import LookupAnswer, LookupRequest, PendingLookup, SessionUpdate
from kvtier.clients.vllm.scheduler.saving import Saver
from kvtier.clients.vllm.scheduler.side import SchedulerSide
from kvtier.clients.vllm.worker.side import WorkerSide
from kvtier.clients.vllm.worker.transfers import transfers_of
from kvtier.testing import FakeAppliance

from .engine import LAYERS, PAGE_BYTES, PagedCache, Pool, Request, content

OPTIONS = Options(target="in this process", num_load_threads=1, max_early_leases=4, max_unsaved_fraction=0.3)
STEP_TOKENS = 40
STEP_S = 0.05  # for the clock of the breaker: it opens, and closes again, at the same step in every run


class Inline:
    """Threads of a worker that run when they are told to."""

    def __init__(self) -> None:
        self.work: dict[str, Callable[[], None]] = {}

    def run(self, name: str, work: Callable[[], None], in_background: bool) -> threading.Thread:
        self.work[name] = work
        return threading.Thread()


class InlineAgent:
    """LookupAgent that answers in this thread, when `pump` is called: at once, or, as for blocks that come
    from a slower tier, after saying what is pinned, by the next pump."""

    def __init__(
        self,
        appliance: FakeAppliance,
        groups: Sequence[Group],
        identities: Sequence[Any],
        randomly: random.Random,
    ) -> None:
        self._random = randomly
        self.arriving_chance = 0.5
        self._loop = asyncio.new_event_loop()
        self._client: AsyncClient = appliance.async_client(name="scheduler")
        self._finder = Finder(self._client, groups, 30.0, 1.0)
        self._identities = identities
        self._waiting: list[PendingLookup] = []
        self._arriving: list[PendingLookup] = []
        self._found: dict[PendingLookup, FoundPrefix] = {}
        self.told: list[tuple[str, SessionUpdate]] = []

    def allows(self) -> bool:
        return True

    def wait(self, asked: PendingLookup, timeout_s: float) -> None:
        """Answers come when they are pumped, not before."""

    def silent(self) -> None:
        raise AssertionError("no clock runs here")

    def ask(self, question: LookupRequest) -> PendingLookup:
        asked = PendingLookup(question, 0.0)
        self._waiting.append(asked)
        return asked

    def release(self, asked: PendingLookup) -> None:
        asked.is_released = True
        if found := self._found.pop(asked, None):
            self._loop.run_until_complete(self._release(found))

    def tell(self, session: str, word: SessionUpdate) -> None:
        self.told.append((session, word))

    def where(self, salt: str, adapter: bytes) -> tuple[int, bytes] | None:
        return None

    @property
    def num_pinned(self) -> int:
        return len(self._found)

    def pump(self) -> None:
        arriving, self._arriving = self._arriving, []
        for asked in arriving:
            self._loop.run_until_complete(self._conclude(asked))
        waiting, self._waiting = self._waiting, []
        for asked in waiting:
            self._loop.run_until_complete(self._answer(asked))

    def close(self) -> None:
        self._loop.run_until_complete(self._client.close())
        self._loop.close()

    async def _answer(self, asked: PendingLookup) -> None:
        found, question = FoundPrefix(), asked.question
        try:
            namespaces = [
                [await self._client.register(salted(i, question.salt, b"")) for i in self._identities]
            ]
            await self._finder.pin(namespaces, question, found)
        except KvtierError:
            asked.answer = LookupAnswer(cause="misses_error")
            return
        if asked.is_released:
            await self._release(found)
            return
        asked.is_pinned = True
        self._found[asked] = found
        if found.num_tokens and self._random.random() < self.arriving_chance:
            asked.arriving = LookupAnswer(found.num_tokens, found.stored, found.tiers)
            self._arriving.append(asked)
        else:
            await self._conclude(asked)

    async def _conclude(self, asked: PendingLookup) -> None:
        found = self._found.get(asked)
        if found is None:
            return  # released meanwhile
        try:
            await self._finder.wait(found, asked.question)
            asked.answer = LookupAnswer(found.num_tokens, found.stored, found.tiers)
        except KvtierError:
            asked.answer = LookupAnswer(cause="misses_error")
        if not asked.answer.num_tokens:
            del self._found[asked]
            await self._release(found)

    async def _release(self, found: FoundPrefix) -> None:
        for lease in found.leases:
            await lease.release()


class Simulation:
    """`step()` is one engine step; it raises AssertionError when KV is used that is not right."""

    def __init__(
        self,
        groups: Sequence[Group],
        appliance: FakeAppliance,
        randomly: random.Random,
        num_blocks: int = 64,
        prefix_caching: bool = True,
        options: Options = OPTIONS,
    ) -> None:
        self.groups = list(groups)
        self.random = randomly
        self.prefix_caching = prefix_caching
        self.pool = Pool(num_blocks)
        self.cache = PagedCache(groups, num_blocks)
        self.counters = Counters()
        self.totals: dict[str, float] = {}
        identities = [
            identity_of(
                bytes(32), LAYERS, PAGE_BYTES, g.block_tokens, (1, 1, "int8"), "test", f"group={g.index}", ""
            )
            for g in groups
        ]
        self.agent = InlineAgent(appliance, groups, identities, randomly)
        saver = Saver(groups, 1, int(0.3 * num_blocks), self.pool, self.counters)
        self.num_steps = 0
        self.inline = Inline()
        self.worker = WorkerSide(
            options,
            self.cache.paged,
            transfers_of(lambda _: appliance.client(name="worker"), identities, self.cache.paged),
            self.counters,
            clock=lambda: self.num_steps * STEP_S,
            run=self.inline.run,
        )
        self.scheduler = SchedulerSide(options, groups, self.agent, saver, self.counters, clock=lambda: 0.0)
        self.requests: dict[str, Request] = {}
        self.num_hit_tokens = 0
        self.num_finished = 0

    # ------------------------------------------------------------------------------- from outside

    def add(self, request: Request) -> None:
        request.tables = [[] for _ in self.groups]
        self.requests[request.request_id] = request
        self.scheduler.arrived(request)

    def abort(self, request: Request) -> None:
        self.scheduler.finished(request, request.tables)
        if request.state == "loading":
            request.state = "aborted"  # its blocks stay until the load is over
        else:
            self._free(request)
            del self.requests[request.request_id]

    def step(self, answers: bool = True, loads: bool = True, saves: bool = True) -> None:
        """One step. `answers`, `loads`, `saves`: whether the threads get anywhere meanwhile."""
        self.num_steps += 1
        if answers:
            self.agent.pump()
        scheduled = self._schedule_running()
        scheduled |= self._schedule_waiting()
        plan = StepPlan()
        self.scheduler.plan(plan, scheduled, lambda name: self.requests[name].tables)
        for name, num_tokens in scheduled.items():
            self._forward(self.requests[name], num_tokens)
        self.worker.start_loads(plan)
        self.worker.start_saves(plan)
        self._work(loads, saves)
        finished, failed = self.worker.take_loaded()
        self.scheduler.loaded(finished, failed)
        self.scheduler.saved(self._acks())
        for name in finished:
            self._loaded(self.requests[name], name in failed)
        for name in scheduled:
            self._sample(self.requests[name])
        self._audit()

    def drain(self, num_steps: int = 5000) -> None:
        """Step until nothing is left. Raises AssertionError when something never ends."""
        for _ in range(num_steps):
            if not self.requests and not self.scheduler.is_busy:
                return
            self.step()
        raise AssertionError(f"still there: {[(r.request_id, r.state) for r in self.requests.values()]}")

    def close(self) -> None:
        self.agent.close()

    # ----------------------------------------------------------------------------------- schedule

    def _schedule_running(self) -> dict[str, int]:
        scheduled: dict[str, int] = {}
        for request in [r for r in self.requests.values() if r.state == "running"]:
            if request.state == "running" and (number := self._grow(request)):
                scheduled[request.request_id] = number
        return {name: number for name, number in scheduled.items() if self.requests[name].state == "running"}

    def _grow(self, request: Request) -> int:
        number = min(STEP_TOKENS, request.num_tokens - request.num_computed_tokens)
        while not self._allocate(request, request.num_computed_tokens + number):
            others = [r for r in self.requests.values() if r.state == "running" and r is not request]
            if not others:
                self._preempt(request)
                return 0
            self._preempt(others[-1])
        return number

    def _preempt(self, request: Request) -> None:
        self._free(request)
        request.state, request.num_computed_tokens = "waiting", 0
        request.num_preemptions += 1

    def _schedule_waiting(self) -> dict[str, int]:
        scheduled = {}
        for request in [r for r in self.requests.values() if r.state == "waiting"]:
            if request.num_computed_tokens == 0 and not self._admit(request):
                continue
            number = min(STEP_TOKENS, request.num_tokens - request.num_computed_tokens)
            if request.state != "waiting" or not self._allocate(
                request, request.num_computed_tokens + number
            ):
                continue
            self.scheduler.allocated(request, request.tables, 0)
            request.state = "running"
            scheduled[request.request_id] = number
        return scheduled

    def _admit(self, request: Request) -> bool:
        """Local and external hits of a request that has nothing yet; False when it cannot go on."""
        local = self._local_blocks(request)
        num_local = len(local) * self.groups[0].block_tokens
        number, is_async = self.scheduler.matched_tokens(request, num_local)
        if number is None:
            return False
        self.pool.hold(local)
        request.tables[0] = list(local)
        request.num_computed_tokens = num_local
        if not number:
            return True
        assert is_async
        assert num_local + number <= request.num_tokens
        reserved = sum(self._missing(one) for one in self.requests.values() if any(one.tables))
        fits = reserved + self._missing(request) <= self.pool.num_free
        if not fits or not self._allocate(request, num_local + number, at=num_local + number):
            self._free(request)
            request.num_computed_tokens = 0
            return False
        self.scheduler.allocated(request, request.tables, number)
        request.num_computed_tokens += number
        self.num_hit_tokens += number
        request.state = "loading"
        return False

    def _missing(self, request: Request) -> int:
        """Blocks that a request still needs at most. Loads are admitted only where this fits, as by vLLM."""
        return sum(
            max(0, -(-request.max_tokens // g.block_tokens) - len(request.tables[g.index]))
            for g in self.groups
        )

    def _local_blocks(self, request: Request) -> list[int]:
        blocks: list[int] = []
        if self.prefix_caching and len(self.groups) == 1:
            for name in self.groups[0].chain(request.block_hashes):
                block = self.pool.cached.get((0, name))
                if block is None or (len(blocks) + 1) * self.groups[0].block_tokens >= request.num_tokens:
                    break
                blocks.append(block)
        return blocks

    def _allocate(self, request: Request, num_tokens: int, at: int | None = None) -> bool:
        """Make room for the first `num_tokens` tokens; windows give away what `at` cannot see."""
        at = request.num_computed_tokens if at is None else at
        for group in self.groups:
            self._slide(request, group, at)
        wanted = [-(-num_tokens // g.block_tokens) - len(request.tables[g.index]) for g in self.groups]
        unseen = [max(0, g.first_needed(at) - len(request.tables[g.index])) for g in self.groups]
        if sum(max(0, w - u) for w, u in zip(wanted, unseen, strict=True)) > self.pool.num_free:
            return False
        for group, count, nulls in zip(self.groups, wanted, unseen, strict=True):
            for i in range(count):
                block = NULL_BLOCK if i < nulls else self.pool.take()
                if block != NULL_BLOCK:
                    self.cache.scribble(block)
                request.tables[group.index].append(block)
        return True

    def _slide(self, request: Request, group: Group, at: int) -> None:
        table = request.tables[group.index]
        for i in range(min(group.first_needed(at), len(table))):
            if table[i] != NULL_BLOCK:
                self.pool.free([table[i]])
                table[i] = NULL_BLOCK

    # ------------------------------------------------------------------------------------ execute

    def _forward(self, request: Request, num_tokens: int) -> None:
        """Compute: all that is before must be right; what is filled now becomes right."""
        start, end = request.num_computed_tokens, request.num_computed_tokens + num_tokens
        for group in self.groups:
            names, table = group.chain(request.block_hashes), request.tables[group.index]
            for i in range(group.first_needed(start), group.num_blocks(start)):
                assert self.cache.is_right(group.index, table[i], names[i]), (
                    f"{request.request_id} uses wrong KV: group {group.index}, block {i} of {start} tokens"
                )
            for i in range(group.num_blocks(start), group.num_blocks(end)):
                self.cache.write(group.index, table[i], content(names[i], group.index))
                self._cache(group.index, table[i], names[i])

    def _cache(self, group: int, block: int, name: bytes) -> None:
        if self.prefix_caching and len(self.groups) == 1:
            self.pool.cache(block, group, name)

    def _work(self, loads: bool, saves: bool) -> None:
        if loads:
            self.worker._loads.put(None)
            self.inline.work["kvtier-load-0"]()
            self.worker._arriving_loads.put(None)
            self.inline.work["kvtier-load-1"]()
        if saves:
            self.worker._saves.put(None)
            self.inline.work["kvtier-save"]()

    def _acks(self) -> Acks:
        acks = Acks()
        acks.add(self.worker.take_acks())
        return acks

    def _loaded(self, request: Request, failed: bool) -> None:
        if request.state == "aborted":
            self._free(request)
            del self.requests[request.request_id]
            return
        request.state = "waiting"
        if failed:
            self._free(request)
            request.num_computed_tokens = 0
            return
        names = self.groups[0].chain(request.block_hashes)
        for i in range(request.num_computed_tokens // self.groups[0].block_tokens):
            self._cache(0, request.tables[0][i], names[i])
        if request.num_computed_tokens == request.num_tokens:
            request.num_computed_tokens -= 1  # the last token is computed again, to sample from it

    def _sample(self, request: Request) -> None:
        remaining = request.num_tokens - request.num_computed_tokens
        request.num_computed_tokens += min(STEP_TOKENS, remaining)
        if request.num_computed_tokens < request.num_tokens:
            return
        if request.num_tokens >= request.max_tokens:
            self.scheduler.finished(request, request.tables)
            self._free(request)
            del self.requests[request.request_id]
            self.num_finished += 1
        else:
            request.tokens.append(sum(request.tokens[-3:]) % 500)

    # -------------------------------------------------------------------------------------- books

    def _free(self, request: Request) -> None:
        for table in request.tables:
            self.pool.free([block for block in reversed(table) if block != NULL_BLOCK])
            table.clear()

    def _audit(self) -> None:
        assert self.scheduler.check_integrity() == []
        for name, amount in self.counters.take().items():
            self.totals[name] = self.totals.get(name, 0) + amount
        assert not self.totals.get("hook_errors"), self.totals
