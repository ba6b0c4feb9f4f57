"""The scheduler's half of the connector: what is promised to the engine, and what is planned for its workers.

    on arrival      ask (agent.py): look up, pin, bring up
    matched_tokens  None until the answer is there, then all of it, asynchronously; 0 when there is doubt.
                    One load at a time may begin while its pinned blocks are still on their way up
    allocated       the promised blocks have places: plan the load
    plan            loads and saves of this step
    update          loads are over: release; saves are over: free their blocks
    finished        release what is left; the session ends, or waits for its next turn

Pure: no thread, no socket, no vLLM. A request of the engine is read, never changed.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from ....v1.types import Urgency
from ..counters import Counters
from ..groups import Group
from ..options import Options
from ..plan import Acks, Load, Save, StepPlan, part_of
from .handover import source_of, told_of
from .lookups import LookupAgent, LookupAnswer, PendingLookup, SessionUpdate
from .saving import NEVER, Saver, Saving, StoredBlocks, share_out
from .sessions import Turn, turn_of
from .tracked import Tracked

ASK_AGAIN_AFTER = 2  # answer timeouts; a request loses one of them while its turn has come
GRACE_S = 1.0  # beyond the time that promotions may take
MAX_QUESTIONS = 3  # per attempt to schedule a request: its lease got lost, or its local blocks did
States = Mapping[str, Sequence[tuple[int, int, int]]]
MISS = (0, False)
PENDING = (None, False)


class SchedulerSide:
    """Everything that happens in the engine's scheduler process.

    No method blocks, but for `answer_wait_s` of a step in all."""

    def __init__(
        self,
        options: Options,
        groups: Sequence[Group],
        agent: LookupAgent,
        saver: Saver,
        counters: Counters,
        engine: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._options = options
        self._groups = list(groups)
        self._has_states = any(group.is_recurrent for group in groups)
        self._agent = agent
        self._saver = saver
        self._counters = counters
        self._engine = engine
        self._clock = clock
        self._tracked: dict[str, Tracked] = {}
        self._loading: dict[str, Tracked] = {}  # until every rank has said that it is over
        self._num_arriving = 0  # loads that were begun early, and are not over
        self._planned: list[Load] = []
        self._last_saves: list[Save] = []  # of requests that have ended
        self._num_leased = 0
        self._wait_left_s = options.answer_wait_s  # in this step
        self.salt = ""

    # -------------------------------------------------------------------------------- scheduling

    def arrived(self, request: Any) -> None:
        """A request was added to the engine's queue."""
        tracked = self._track(request)
        if self._num_leased < self._options.max_early_leases:
            self._ask(tracked, self._saver.num_local_tokens(request.block_hashes), is_early=True)

    def matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return how many tokens beyond `num_computed_tokens` will be loaded, and whether asynchronously.

        (None, False) while that is not known. Idempotent while nothing changes."""
        tracked = self._tracked.get(request.request_id) or self._track(request)
        if tracked.num_preemptions != request.num_preemptions:  # its blocks are gone: everything anew
            tracked.num_preemptions = request.num_preemptions
            tracked.given_up, tracked.num_questions = False, 0
        if tracked.given_up or request.skip_reading_prefix_cache:
            self._let_go(tracked)
            return MISS
        asked = tracked.asked
        if asked is not None and (self._is_stale(asked, num_computed_tokens) or self._may_ask_again(asked)):
            self._let_go(tracked)
            asked = None
        if asked is None:
            asked = self._ask(tracked, num_computed_tokens)
            if asked is None:
                return MISS
        if tracked.polled_at is None:
            tracked.polled_at = self._clock()
        if asked.answer is None and not asked.is_pinned and self._wait_left_s > 0:
            self._wait_a_little(asked)
        answer = asked.answer or self._early_answer(tracked, asked)
        if answer is None:
            if self._is_late(asked, tracked.polled_at):
                return self._give_up(tracked, "misses_timeout")
            return PENDING
        return self._promise(tracked, answer, num_computed_tokens)

    def allocated(self, request: Any, block_ids: Sequence[Sequence[int]], num_external_tokens: int) -> None:
        """The engine has allocated blocks, `num_external_tokens` of them for what was promised."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            return
        if num_external_tokens <= 0:
            if not tracked.is_loading:
                self._let_go(tracked)  # another connector's, or nothing to load
            return
        first, end = tracked.promised_from, tracked.promised_from + num_external_tokens
        size = self._groups[0].block_tokens
        load = Load(
            request.request_id, tracked.turn.session, list(block_ids[0][first // size : -(-end // size)])
        )
        self._planned.append(load)  # first: whatever happens, this load must be reported as over
        tracked.is_loading = True
        self._loading[request.request_id] = tracked
        answer = tracked.promised if tracked.asked else None
        if answer is None or tracked.asked is None:
            return
        if tracked.asked.answer is None:
            load.is_arriving = tracked.is_arriving = True
            self._num_arriving += 1
            self._counters.add("hits_early")
        other = tracked.asked.question.source
        self._counters.add("handovers", other is not None)
        if other is not None and load.is_arriving:
            load.expected = other.expected(0, self._options.handover_wait_s)
        load.adapter = answer.adapter
        load.parts = [
            part
            for group, table in zip(self._groups, block_ids, strict=True)
            if (part := part_of(group, request.block_hashes, table, first, end))
        ]
        self._counters.add("hits")
        for source, number in self.hit_sources(request, num_external_tokens).items():
            self._counters.add(f"hit_tokens_{source}", number)

    def hit_sources(self, request: Any, num_external_tokens: int) -> dict[str, int]:
        """Return the promised tokens by where they were found: "host" or "disk"."""
        tracked = self._tracked.get(request.request_id)
        size = self._groups[0].block_tokens
        num_disk = tracked.num_on_disk(num_external_tokens, size) if tracked and tracked.asked else 0
        sources = {"host": num_external_tokens - num_disk, "disk": num_disk}
        return {source: number for source, number in sources.items() if number}

    # -------------------------------------------------------------------------------- every step

    def plan(
        self,
        plan: StepPlan,
        scheduled: dict[str, int],
        tables: Callable[[str], Any],
        states: Callable[[], States] = dict,
    ) -> None:
        """Fill in the step's plan.

        `scheduled` has the number of tokens per request that runs in this step, `tables` returns a request's
        block tables, one per group. `states` returns recurrent states that stand still after this step, by
        request: (group, block, number of tokens).

        Fills instead of returning: should this fail half-way, the loads are in the plan all the same, and
        the engine does not wait for one that was never begun.
        """
        self._wait_left_s = self._options.answer_wait_s
        plan.loads, self._planned = self._planned, []
        plan.saves, self._last_saves = self._last_saves, []
        plan.salt = self.salt
        for request_id, num_new_tokens in scheduled.items():
            tracked = self._tracked.get(request_id)
            if tracked is None:
                continue
            num_tokens = tracked.request.num_computed_tokens + num_new_tokens
            if tracked.urgency is not Urgency.DECODING:
                self._hurry(tracked, num_tokens)
            if num_tokens >= tracked.saving.due_tokens:
                saves = self._save(tracked, num_tokens, tables)
                if num_tokens <= tracked.request.num_prompt_tokens:
                    share_out(saves, self._groups, num_new_tokens, sum(scheduled.values()))
                plan.saves += saves
        for request_id, offered in states().items():
            tracked = self._tracked.get(request_id)
            if tracked is not None:
                plan.saves += self._save_states(tracked, offered)

    def loaded(self, finished: Iterable[str], failed: Iterable[str]) -> None:
        """Every rank has ended these loads; those in `failed` not well."""
        failures = set(failed)
        for request_id in finished:
            tracked = self._loading.pop(request_id, None)
            if tracked is None:
                continue
            tracked.is_loading = False
            was_early, tracked.is_arriving = tracked.is_arriving, False
            self._num_arriving -= was_early
            if request_id in failures:
                tracked.may_be_early = False
                tracked.given_up = not was_early  # recompute: what fails once may fail for ever
                self._counters.add("misses_load_failed")
            elif (
                was_early and tracked.promised is not None
            ):  # more is stored by now than when it was promised
                num_tokens = tracked.promised.num_tokens
                self._learn(tracked, [group.num_blocks(num_tokens) for group in self._groups])
            self._let_go(tracked)

    def saved(self, acks: Acks) -> list[StoredBlocks]:
        """Saves are over; return what is stored on every rank now."""
        return self._saver.settle(acks)

    def finished(self, request: Any, block_ids: Sequence[Sequence[int]]) -> dict[str, Any] | None:
        """A request has ended, by itself or by abort; its blocks are about to be freed.

        A load under way keeps its lease until it is over. Returns what the decode engine is to be told."""
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is None:
            return None
        num_saved = 0
        if not tracked.is_loading:
            self._let_go(tracked)
            num_tokens = request.num_computed_tokens
            self._last_saves += self._save(tracked, num_tokens, lambda _: block_ids)
            num_saved = self._num_saveable(tracked, num_tokens)
            num_left = self._saver.num_left(tracked.saving, num_saved)
            self._counters.add("saves_skipped_backpressure", num_left)
        turn = tracked.turn
        urgency = Urgency.ENDED if turn.is_last else Urgency.WAITING
        num_decoded = max(0, request.num_tokens - request.num_prompt_tokens)
        self._tell(turn, SessionUpdate(urgency, None, turn.returns_in_s, num_decoded, turn.is_last))
        where = partial(self._agent.where, self.salt, tracked.adapter)
        return told_of(request, self._groups, where, num_saved)

    @property
    def is_busy(self) -> bool:
        """Whether something is under way that only further steps can end."""
        return self._saver.is_busy or bool(self._planned or self._last_saves)

    def reset(self, salt: str) -> None:
        """What was stored so far is of no use any more, e.g. because the weights have changed.

        Nor is what requests have computed or loaded so far: it must not be stored under the new salt."""
        self.salt = salt
        self._saver.forget_all()
        self._saver.drop(self._last_saves)
        self._last_saves = []
        for tracked in self._tracked.values():
            is_old = tracked.is_loading or tracked.request.num_computed_tokens > 0
            tracked.saving = self._nothing_saved(tracked.request, NEVER if is_old else 0)
            if not tracked.is_loading:
                self._let_go(tracked)
                tracked.num_questions = 0

    def check_integrity(self) -> list[str]:
        """Audit: leases are counted, loads belong to requests that wait for them."""
        problems = self._saver.check_integrity()
        everyone = {id(t): t for t in (*self._tracked.values(), *self._loading.values())}
        num_leased = sum(tracked.asked is not None for tracked in everyone.values())
        if num_leased != self._num_leased:
            problems.append(f"{num_leased} requests have asked, counted {self._num_leased}")
        num_arriving = sum(tracked.is_arriving for tracked in self._loading.values())
        if num_arriving != self._num_arriving or num_arriving > self._options.max_arriving_loads:
            problems.append(f"{num_arriving} loads were begun early, counted {self._num_arriving}")
        problems += [
            f"{name} is loading and does not know" for name, t in self._loading.items() if not t.is_loading
        ]
        return problems

    # --------------------------------------------------------------------------------- internals

    def _track(self, request: Any) -> Tracked:
        turn, (source, is_refused) = turn_of(request, self._engine), source_of(request, self._groups)
        tracked = Tracked(request, turn, self._nothing_saved(request), source)
        self._counters.add("handovers_refused", is_refused)
        self._tracked[request.request_id] = tracked
        self._counters.add("hints_ignored", tracked.turn.num_ignored_hints)
        return tracked

    def _nothing_saved(self, request: Any, first_block: int = 0) -> Saving:
        return Saving([first_block] * len(self._groups), num_prompt_tokens=request.num_prompt_tokens)

    def _ask(
        self, tracked: Tracked, num_computed_tokens: int, is_early: bool = False
    ) -> PendingLookup | None:
        """Ask; None when there is nothing to ask for, or no daemon: for good, unless it `is_early`."""
        request = tracked.request
        first_token = min(
            group.num_blocks(num_computed_tokens) * group.block_tokens for group in self._groups
        )
        shortest = max(group.block_tokens for group in self._groups)
        may_load = self._options.load and tracked.turn.may_load
        if not may_load or request.num_tokens - first_token < shortest:
            return None
        if tracked.num_questions >= MAX_QUESTIONS:
            tracked.given_up = True
            return None
        if not self._agent.allows():
            if is_early:  # it may answer again by the time that the scheduler comes to this request
                return None
            self._counters.add("misses_breaker")
            tracked.given_up = True
            return None
        tracked.num_questions += 1
        tracked.polled_at = None
        self._counters.add("lookups")
        question = tracked.question(self._options, first_token, self.salt, self._has_states)
        tracked.asked = self._agent.ask(question)
        self._num_leased += 1
        return tracked.asked

    def _early_answer(self, tracked: Tracked, asked: PendingLookup) -> LookupAnswer | None:
        """What is pinned, though some of it is on its way up still: its load then overlaps with that. A
        request with a deadline waits: what has not come up by then is computed instead."""
        if not tracked.may_be_early or tracked.turn.deadline_s:
            return None
        return asked.arriving if self._num_arriving < self._options.max_arriving_loads else None

    def _promise(
        self, tracked: Tracked, answer: LookupAnswer, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        tracked.adapter = answer.adapter
        if answer.stored and tracked.learned_from is not answer:
            tracked.learned_from = answer
            self._learn(tracked, answer.stored)
        gain = min(answer.num_tokens, tracked.request.num_tokens) - num_computed_tokens
        if gain <= 0 or gain < self._options.min_load_tokens:
            return self._give_up(tracked, answer.cause or "misses_nothing_stored")
        tracked.promised, tracked.promised_from = answer, num_computed_tokens
        return gain, True

    def _learn(self, tracked: Tracked, stored: Sequence[int]) -> None:
        """Note how many blocks of a request are stored on all ranks, per group: they are not saved again."""
        self._saver.seen(tracked.request.block_hashes, stored, tracked.request, tracked.adapter)
        for i, number in enumerate(stored):
            tracked.saving.next_block[i] = max(tracked.saving.next_block[i], number)
        tracked.saving.due_tokens = 0

    def _give_up(self, tracked: Tracked, cause: str) -> tuple[int, bool]:
        if cause == "misses_timeout" and not (tracked.asked and tracked.asked.is_pinned):
            self._agent.silent()  # one that was pinned once was answered, and may wait for room since
        if not tracked.given_up:
            self._counters.add(cause)
        tracked.given_up = True
        self._let_go(tracked)
        return MISS

    def _let_go(self, tracked: Tracked) -> None:
        if tracked.asked is not None:
            self._agent.release(tracked.asked)
            tracked.asked = None
            self._num_leased -= 1

    def _is_stale(self, asked: PendingLookup, num_computed_tokens: int) -> bool:
        """Whether the pin has ended, or does not begin where the engine's own blocks end any more."""
        if asked.is_lost:
            self._counters.add("leases_lost")
            return True
        first = asked.question.first_token
        return any(group.num_blocks(num_computed_tokens) < group.num_blocks(first) for group in self._groups)

    def _may_ask_again(self, asked: PendingLookup) -> bool:
        """Whether the last lookup failed so long ago that the daemon may answer by now: a request that waited
        in the queue meanwhile is looked up again."""
        has_failed = asked.answer is not None and asked.answer.cause == "misses_error"
        return (
            has_failed and self._clock() - asked.asked_at > ASK_AGAIN_AFTER * self._options.answer_timeout_s
        )

    def _wait_a_little(self, asked: PendingLookup) -> None:
        """Requests that arrived together would start in different steps, each with its own pass over the
        weights, if the first ones were sent away for the half millisecond that an answer takes."""
        started_at = self._clock()
        self._agent.wait(asked, self._wait_left_s)
        self._wait_left_s -= self._clock() - started_at

    def _is_late(self, asked: PendingLookup, polled_at: float) -> bool:
        limit_s = self._options.answer_timeout_s
        if asked.is_pinned:
            limit_s = asked.question.deadline_s + GRACE_S
        return self._clock() - polled_at > limit_s

    def _save(self, tracked: Tracked, num_tokens: int, tables: Callable[[str], Any]) -> list[Save]:
        """Plan what the first `num_tokens` tokens of a request have filled and that are not saved yet."""
        request = tracked.request
        num_tokens = self._num_saveable(tracked, num_tokens)
        if num_tokens < tracked.saving.due_tokens:
            return []
        if request.lora_request and not tracked.adapter:
            return []  # without its digest adapters could not be told apart
        table = tables(request.request_id)
        if table is None:
            return []
        return self._saver.plan(
            tracked.saving, request.block_hashes, num_tokens, table, tracked.turn, tracked.adapter, request
        )

    def _save_states(self, tracked: Tracked, offered: Sequence[tuple[int, int, int]]) -> list[Save]:
        request, saves = tracked.request, []
        if request.lora_request and not tracked.adapter:
            return []
        for index, block_id, num_tokens in offered:
            group = self._groups[index]
            is_boundary = group.is_recurrent and num_tokens > 0 and num_tokens % group.block_tokens == 0
            is_named = num_tokens // group.block_tokens * group.hashes_per_block <= len(request.block_hashes)
            is_old = tracked.saving.next_block[index] == NEVER
            if (
                is_boundary
                and is_named
                and not is_old
                and num_tokens <= self._num_saveable(tracked, num_tokens)
            ):
                name = group.name_of(request.block_hashes, num_tokens)
                saves += self._saver.save_state(
                    tracked.saving, name, index, block_id, tracked.turn, tracked.adapter
                )
        return saves

    def _num_saveable(self, tracked: Tracked, num_tokens: int) -> int:
        """Return how many of the first `num_tokens` tokens may be saved. Those that are not verified yet have
        no hash, and need no limit here."""
        match self._options.save if tracked.turn.may_save else "none":
            case "none":
                return 0
            case "prompt":
                return min(num_tokens, int(tracked.request.num_prompt_tokens))
        return num_tokens

    def _hurry(self, tracked: Tracked, num_tokens: int) -> None:
        """Tell the appliance when the urgency of a session changes; not when its prompt ends in this step:
        the next one says that it decodes."""
        num_prompt_tokens = tracked.request.num_prompt_tokens
        if num_tokens == num_prompt_tokens:
            return
        urgency = Urgency.DECODING if num_tokens > num_prompt_tokens else Urgency.PREFILL
        if urgency != tracked.urgency:
            tracked.urgency = urgency
            self._tell(tracked.turn, SessionUpdate(urgency, tracked.turn.deadline_s))

    def _tell(self, turn: Turn, update: SessionUpdate) -> None:
        if not turn.is_private:
            self._agent.tell(turn.session, update)
