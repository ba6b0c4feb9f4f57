"""Background thread that performs lookups for the scheduler, so that schedule() never waits for the daemon.

One connection carries any number of lookups at a time: a prefix that comes up from nvme does not hold up
the next one. Blocking clients in a pool of threads were rejected: the pool would have to be as large as the
queue of requests.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from ....v1.types import NamespaceIdentity, Urgency
from ...aio import AsyncClient, AsyncLease, AsyncSession
from ...connector.breaker import Breaker
from ...errors import DeadlineExceeded, KvtierError
from ...values.namespace import Namespace
from ..counters import Counters
from ..groups import Group
from ..identity import adapter_digest, salted
from ..options import Options
from .announcer import Announcer, Block
from .announcing import Announcing
from .finding import Finder, FoundPrefix
from .lookups import LookupAnswer, LookupRequest, PendingLookup, SessionUpdate

MAX_TASKS = 4096  # lookups at a time
LINE_PERIOD_S = 2.0  # after which one in line tries again unasked
PROBE_PERIOD_S = 1.0  # while the appliance does not answer
TELL_DELAY_S = 0.005  # a session that hurries through its states is told once
DECODING_DELAY_S = 2.0  # most answers are over by then: what they use was used last, and stays without this
FAILED = LookupAnswer(cause="misses_error")


class Agent:
    """Implements lookups.LookupAgent. `ranks` are the identities of each rank's namespaces, one per group."""

    def __init__(
        self,
        options: Options,
        groups: Sequence[Group],
        ranks: Sequence[Sequence[NamespaceIdentity]],
        make_client: Callable[[], AsyncClient],
        counters: Counters,
        clock: Callable[[], float] = time.monotonic,
        announcer: Announcer | None = None,
    ) -> None:
        self.breaker = Breaker(max_pause_s=PROBE_PERIOD_S, clock=clock)
        self._options = options
        self._groups = list(groups)
        self._ranks = [list(identities) for identities in ranks]
        self._make_client = make_client
        self._counters = counters
        self._clock = clock
        self._announcer = announcer
        self._announcing: Announcing | None = None
        self._namespaces: dict[tuple[str, bytes], list[list[Namespace]]] = {}
        self._leases: dict[PendingLookup, list[AsyncLease]] = {}
        self._num_releasing = 0  # lookups that have leases on their way back
        self._line: deque[asyncio.Future[None]] = deque()  # of those that found no room to pin
        self._unsent: dict[str, tuple[SessionUpdate, float]] = {}  # and when it is due
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_lookups = 0
        self._epoch = 0  # of the daemon that answered last
        self._adapters: dict[tuple[int, str], bytes] = {}  # digests at their first lookup
        self._is_up = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvtier-agent", daemon=True)
        self._thread.start()
        self._is_up.wait(10.0)

    # ------------------------------------------------------------------- the scheduler's thread

    def allows(self) -> bool:
        """Whether to ask now; False while the appliance does not answer."""
        return self.breaker.allows()

    def ask(self, question: LookupRequest) -> PendingLookup:
        """Start a lookup that pins."""
        asked = PendingLookup(question, self._clock())
        self._submit(self._begin, asked)
        return asked

    def wait(self, asked: PendingLookup, timeout_s: float) -> None:
        """Return when the answer is there, or after `timeout_s`."""
        asked.has_answer.wait(timeout_s)

    def silent(self) -> None:
        """Note that an answer did not come in time."""
        self._failed(DeadlineExceeded("no answer to a lookup in time", reason="NO_ANSWER"))

    def release(self, asked: PendingLookup) -> None:
        """End the pin, now or when it comes. Idempotent."""
        if not asked.is_released:
            asked.is_released = True
            self._submit(self._let_go, asked)

    def tell(self, session: str, update: SessionUpdate) -> None:
        """Note the state of a session; the latest update counts."""
        self._submit(self._note, session, update)

    def where(self, salt: str, adapter: bytes) -> tuple[int, bytes] | None:
        """Return the daemon's epoch and the digest of the first namespace; None when they are not known."""
        known = self._namespaces.get((salt, adapter))
        return (self._epoch, known[0][0].digest) if known and self._epoch and self.allows() else None

    def announce(self, blocks: Sequence[Block]) -> None:
        """Announce blocks, with the medium that they are in, for as long as they are stored."""
        if self._announcer is not None and self._announcing is not None:
            self._announcer.add(blocks)
            self._submit(self._announcing.queue, [block.key for block in blocks])

    def close(self) -> None:
        """End the thread and the connection; waits a second at most."""
        self._submit(self._stop)
        self._thread.join(1.0)

    def _submit(self, function: Callable[..., None], *arguments: Any) -> None:
        with suppress(RuntimeError):  # the loop has ended: the engine shuts down
            self._loop.call_soon_threadsafe(function, *arguments)

    # --------------------------------------------------------------------------- its own thread

    def _run(self) -> None:
        asyncio.run(self._main())

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopped = asyncio.Event()
        self._has_news = asyncio.Event()
        self._client = self._make_client()
        self._finder = Finder(
            self._client, self._groups, self._options.lease_ttl_s, self._options.answer_timeout_s / 2
        )
        self._spawn(self._keep_alive())
        self._spawn(self._tell_all())
        self._spawn(self._probe())
        if self._announcer is not None:
            self._announcing = Announcing(self._announcer, self._client, self._namespaces, self._registered)
            self._spawn(self._announcing.watch())
            self._spawn(self._announcing.look_up())
        self._is_up.set()
        await self._stopped.wait()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._client.close()

    def _stop(self) -> None:
        self._stopped.set()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _failed(self, problem: Exception) -> None:
        if self.breaker.failed(problem):
            self._counters.add("breaker_openings")

    async def _probe(self) -> None:
        """Connect before the first request needs it, and again when the appliance is back: no request has
        to be the one that finds out. Each try is a call: a connection may outlive the daemon."""
        is_new = True
        while True:
            if is_new or (self.breaker.is_open and self.breaker.allows()):
                is_new = False
                try:
                    await self._registered("", b"")
                    await self._client.register(self._ranks[0][0])
                    self._epoch = (await self._client.info).epoch
                    self.breaker.succeeded()
                except Exception as problem:  # whatever it is, the next try comes
                    self._failed(problem)
            await asyncio.sleep(PROBE_PERIOD_S / 4)

    # ----------------------------------------------------------------------------------- lookups

    def _begin(self, asked: PendingLookup) -> None:
        if self._num_lookups >= MAX_TASKS:
            asked.answer = FAILED
            asked.has_answer.set()
            return
        self._num_lookups += 1
        self._spawn(self._answer(asked))

    async def _answer(self, asked: PendingLookup) -> None:
        answer = FAILED
        try:
            answer = await self._find(asked)
            self.breaker.succeeded()
        except KvtierError as problem:
            self._failed(problem)
        except Exception as problem:  # whatever it is, the engine must get its answer
            self._counters.add("hook_errors")
            self._failed(problem)
        finally:
            self._num_lookups -= 1
            asked.answer = answer
            asked.has_answer.set()
            if asked.is_released or not answer.num_tokens:
                self._let_go(asked)

    async def _find(self, asked: PendingLookup) -> LookupAnswer:
        question = asked.question
        adapter = await self._adapter(question)
        if adapter is None:
            return LookupAnswer(cause="misses_adapter_changed")
        namespaces = await self._registered(question.salt, adapter)
        self._epoch = (await self._client.info).epoch
        if question.source is not None and not question.source.is_of(namespaces[0][0].digest):
            self._counters.add("handovers_refused")
            question = replace(question, source=None)
            asked.question = question
        found = await self._pin(asked, namespaces)
        may_be_early = question.source is None or len(self._groups) == 1  # windows: all of it, or nothing
        if found.num_tokens and not found.is_complete and may_be_early:
            asked.arriving = _answer_of(found, adapter)
        await self._finder.wait(found, question)
        return _answer_of(found, adapter)

    async def _adapter(self, question: LookupRequest) -> bytes | None:
        """Return the digest of a question's adapter; None when its folder is not what it was at first.

        The engine computes with the weights that it loaded, not with what the folder holds by now, and may
        load it again: until it gives the adapter another number, nothing is known of its KV."""
        path = question.adapter_path
        if not path:
            return b""
        digest = await asyncio.to_thread(adapter_digest, path)
        first = self._adapters.setdefault((question.adapter_id, path), digest)
        return digest if digest == first else None

    async def _pin(self, asked: PendingLookup, namespaces: list[list[Namespace]]) -> FoundPrefix:
        """Pin. The daemon lets one client pin a part of its memory only: a request that finds that used up by
        others of this engine waits in line until they have loaded and released, instead of being computed in
        part. One that was alone from before it pinned until after takes the part: none will be released."""
        while True:
            found, was_alone = FoundPrefix(), self._is_alone
            try:
                await self._finder.pin(namespaces, asked.question, found)
            except BaseException:
                await self._release(found.leases)
                raise
            asked.is_pinned = True
            if not found.is_crowded or (was_alone and self._is_alone) or asked.is_released:
                if found.leases:
                    self._leases[asked] = found.leases
                self._wake_next()
                return found
            await self._release(found.leases)
            self._counters.add("lookups_crowded")
            if not self._is_alone:
                await self._stand_in_line()

    @property
    def _is_alone(self) -> bool:
        """Whether nothing of this engine is pinned, or being given back."""
        return not self._leases and not self._num_releasing

    async def _stand_in_line(self) -> None:
        turn = self._loop.create_future()
        self._line.append(turn)
        try:
            await asyncio.wait_for(turn, LINE_PERIOD_S)
        except TimeoutError:
            self._line.remove(turn)

    def _wake_next(self) -> None:
        """Let the next in line try."""
        while self._line:
            turn = self._line.popleft()
            if not turn.done():
                turn.set_result(None)
                return

    async def _registered(self, salt: str, adapter: bytes) -> list[list[Namespace]]:
        known = self._namespaces.get((salt, adapter))
        if known is None:
            known = [
                [await self._client.register(salted(identity, salt, adapter)) for identity in rank]
                for rank in self._ranks
            ]
            self._namespaces[salt, adapter] = known
        return known

    def _let_go(self, asked: PendingLookup) -> None:
        if leases := self._leases.pop(asked, []):
            self._num_releasing += 1
            self._spawn(self._release_for_next(leases))

    async def _release_for_next(self, leases: list[AsyncLease]) -> None:
        try:
            await self._release(leases)
        finally:
            self._num_releasing -= 1
        self._wake_next()

    async def _release(self, leases: list[AsyncLease]) -> None:
        for lease in leases:
            with suppress(KvtierError):  # a connection that is gone has released everything
                await lease.release()

    async def _keep_alive(self) -> None:
        """Extend the leases of requests that wait."""
        while True:
            await asyncio.sleep(self._options.lease_ttl_s / 3)
            for asked, leases in list(self._leases.items()):
                for lease in leases:
                    try:
                        await lease.extend(self._options.lease_ttl_s)
                    except KvtierError:
                        if self._leases.pop(asked, None) is not None:
                            asked.is_lost = True
                            await self._release(leases)
                        break

    # ---------------------------------------------------------------------------------- sessions

    def _note(self, session: str, update: SessionUpdate) -> None:
        is_decoding = update.urgency is Urgency.DECODING
        self._unsent[session] = update, self._loop.time() + is_decoding * DECODING_DELAY_S
        if not is_decoding or len(self._unsent) == 1:
            self._has_news.set()

    async def _tell_all(self) -> None:
        """Send the latest update of each session when it is due. What fails is dropped: it was a hint."""
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._has_news.wait(), DECODING_DELAY_S if self._unsent else None)
            await asyncio.sleep(TELL_DELAY_S)
            self._has_news.clear()
            now = self._loop.time()
            due = {session: update for session, (update, due_at) in self._unsent.items() if due_at <= now}
            for session_id in due:
                del self._unsent[session_id]
            for session_id, update in due.items():
                if self.breaker.is_open:
                    break
                session = AsyncSession(self._client, session_id)
                num_decoded = update.num_decoded_tokens
                try:
                    if update.is_last:
                        await session.end(num_decoded_tokens=num_decoded)
                    else:
                        await session.update(update.urgency, update.deadline_s, update.back_in_s, num_decoded)
                except KvtierError as problem:
                    self._failed(problem)
                except Exception:  # hints must not end this task
                    self._counters.add("hook_errors")


def _answer_of(found: FoundPrefix, adapter: bytes) -> LookupAnswer:
    cause = "" if found.num_tokens else "misses_nothing_stored"
    return LookupAnswer(found.num_tokens, found.stored, found.tiers, adapter, cause)
