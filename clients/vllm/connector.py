"""KvtierConnector: vLLM's KV connector V1, one object in the scheduler process and one in every worker.

A thin shell: it turns the engine's objects into plain values and back, and lets no exception out. What is
decided is decided in scheduler/, what is moved is moved in worker/.

When something cannot be served (an unknown kind of cache, a checkpoint that cannot be found) the connector
goes dark: it stays loaded, says why once, and promises and saves nothing. A configuration that is wrong is
refused when the engine starts, which is the only time that anything here raises.
"""

import hashlib
import time
import uuid
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from vllm import __version__ as vllm_version
from vllm.config import get_current_vllm_config_or_none
from vllm.distributed.kv_events import KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.logger import init_logger
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

from ...v1.types import NamespaceIdentity
from ..aio import AsyncClient
from ..connector.guard import Defects, harmless
from ..errors import KvtierError
from ..options import Timeout
from .counters import Counters
from .describe import cuda_pages, describe_groups
from .engine import (
    SOURCES,
    BlockTables,
    LoadingBlocks,
    TransferResults,
    states_of,
    why_not_grouped,
    why_not_named,
)
from .groups import groups_of, why_not, why_not_shared
from .messages import KvtierHandshake, KvtierMetadata, KvtierWorkerMetadata
from .metrics import KvtierPromMetrics, KvtierStats
from .options import Options
from .plan import Acks, StepPlan
from .scheduler.agent import Agent
from .scheduler.announcer import Announcer
from .scheduler.events import block_kind, blocks_of, events_of
from .scheduler.saving import Saver, StoredBlocks
from .scheduler.side import MISS, SchedulerSide
from .versions import is_tested
from .worker.pages import LayerView, PagedGroup, device_of
from .worker.side import WorkerSide, client_of
from .worker.transfers import transfers_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.kv_cache_interface import KVCacheConfig


class PoolHolder:
    """The engine's block pool as saving.Holder."""

    def __init__(self) -> None:
        self.pool: BlockPool | None = None

    def hold(self, block_ids: Sequence[int]) -> None:
        """Take a reference on each block."""
        assert self.pool is not None, "the engine has not bound its block pool"
        self.pool.touch([self.pool.blocks[number] for number in block_ids])

    def free(self, block_ids: Sequence[int]) -> None:
        """Give the references back, the chain's end first."""
        assert self.pool is not None
        self.pool.free_blocks(self.pool.blocks[number] for number in reversed(block_ids))

    def has(self, name: bytes) -> bool:
        """Whether the engine's own prefix cache has the block of the first group."""
        return self.pool is not None and self.pool.get_cached_block(name, [0]) is not None


class KvtierConnector(KVConnectorBase_V1, SupportsHMA):
    """Keeps KV in a kvtier appliance. Options: options.py."""

    def __init__(
        self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig"
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = self._kv_transfer_config
        self.options = Options.from_config(transfer.kv_connector_extra_config or {})
        self.counters = Counters()
        self.log = init_logger(f"vllm.kvtier.{role.name.lower()}")
        self.guard = Defects(self.log, partial(self.counters.add, "hook_errors"))
        if transfer.kv_load_failure_policy != "recompute":
            self.log.warning(
                "kvtier: kv_load_failure_policy is set to recompute: a lost block costs time only"
            )
            transfer.kv_load_failure_policy = "recompute"
        _, hash_block_tokens = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
        self._why_dark = (
            why_not(vllm_config, kv_cache_config, hash_block_tokens)
            or why_not_named()
            or why_not_grouped(kv_cache_config)
        )
        every = self.options.window_checkpoint_tokens
        self._groups = [] if self._why_dark else groups_of(kv_cache_config, hash_block_tokens, every)
        engine = transfer.engine_id or uuid.uuid4().hex  # replicas may differ in its last letters only
        self._engine = hashlib.sha256(engine.encode()).hexdigest()[:12]
        self._pool = PoolHolder()
        self._agent: Agent | None = None
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._identities: list[NamespaceIdentity] = []
        self._announcer: Announcer | None = None  # None: the engine publishes no events
        self._step_began_at = 0.0
        self._kinds: list[tuple[str, int | None]] = []  # of the groups, in events
        self._tables = BlockTables()
        self._loading = LoadingBlocks()
        self._lost_blocks: set[int] = set()
        whole = get_current_vllm_config_or_none()  # MultiConnector gives its children a part of it
        self._is_child = whole is not None and whole.kv_transfer_config is not transfer
        self._has_met = self._has_asked = False  # the scheduler the workers
        events = vllm_config.kv_events_config
        self._has_listeners = events is not None and events.enable_kv_cache_events
        if self._why_dark:
            self._go_dark(self._why_dark)
        elif not is_tested(vllm_version):
            self.log.warning("kvtier was never tested with vLLM %s; its interface fits", vllm_version)

    def _go_dark(self, why: str) -> None:
        self._why_dark = why
        self.log.warning("kvtier serves nothing to this engine: %s", why)

    @property
    def requires_kv_delivery(self) -> bool:
        """Return False: a cache; what is not stored is computed again."""
        return False

    # ----------------------------------------------------------------------------------- start

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Learn where the cache's layers are, and begin to serve them."""
        if self._why_dark:
            return
        try:
            self._serve_caches(kv_caches)
        except (KvtierError, OSError) as problem:
            self._go_dark(str(problem))
        except Exception as problem:  # an unknown kind of cache
            self.guard.defect("register_kv_caches")
            self._go_dark(f"{type(problem).__name__}: {problem}")

    def _serve_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        config = self._kv_cache_config
        paged = []
        for group in config.kv_cache_groups:
            layers = [kv_caches[name] for name in group.layer_names if name in kv_caches]
            views = dict.fromkeys(map(LayerView.of_layer, layers))  # shared layers once
            paged.append(PagedGroup(list(views), config.num_blocks))
        self._identities = describe_groups(self._vllm_config, config, paged, self.options)
        device = device_of(kv_caches)
        pages = None
        if device.type == "cuda":
            if why := why_not_shared(self._vllm_config, self._groups):
                self._go_dark(why)
                return
            pages = cuda_pages(paged, device)
            pages.check(self._identities)
        elif device.type != "cpu":
            self._go_dark(f"the KV cache is on {device}; host memory and CUDA are served so far")
            return
        make_client = partial(client_of, self.options, f"vllm-{self._engine}")
        make_transfer = transfers_of(make_client, self._identities, paged, pages)
        self._worker = WorkerSide(self.options, paged, make_transfer, self.counters)

    @harmless(lambda *_, **__: None)
    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Return this worker's namespaces, for the scheduler; None under MultiConnector (messages.py)."""
        return None if self._is_child else self._handshake()

    def _handshake(self) -> KvtierHandshake:
        return KvtierHandshake(self._identities if not self._why_dark else [], self._why_dark)

    @harmless(lambda *_, **__: None)
    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Take all workers' namespaces by (pipeline, tensor) rank, and begin to look up."""
        ranks = [metadata[rank] for rank in sorted(metadata)]
        if ranks and isinstance(ranks[0], KvtierHandshake):  # else a step is asked
            self._meet(ranks)

    def _meet(self, ranks: list[Any]) -> None:
        self._has_met = True
        if self._why_dark:
            return
        num_ranks = self._vllm_config.parallel_config.world_size
        if len(ranks) < num_ranks:
            self._go_dark(f"{len(ranks)} of {num_ranks} workers have said what they hold")
            return
        for rank in ranks:
            if rank.why_not:
                self._go_dark(f"a worker says: {rank.why_not}")
                return
        self._start_scheduler([rank.identities for rank in ranks])

    def _start_scheduler(self, ranks: list[list[NamespaceIdentity]]) -> None:
        options = self.options
        timeout = Timeout(call_s=options.answer_timeout_s, connect_s=options.answer_timeout_s, grace_s=0.5)
        make_client = partial(
            AsyncClient,
            options.target,
            name=f"vllm-{self._engine}",
            domain=options.domain,
            timeout=timeout,
        )
        max_blocks = int(options.max_unsaved_fraction * self._kv_cache_config.num_blocks)
        saver = Saver(self._groups, len(ranks), max_blocks, self._pool, self.counters)
        if self._has_listeners:
            self._announcer = Announcer(len(ranks))
            self._kinds = [block_kind(one.kv_cache_spec) for one in self._kv_cache_config.kv_cache_groups]
            saver.on_stored = self._announce
        self._agent = Agent(
            options, self._groups, ranks, make_client, self.counters, announcer=self._announcer
        )
        self._scheduler = SchedulerSide(
            options,
            self._groups,
            self._agent,
            saver,
            self.counters,
            engine=self._engine,
        )

    def bind_gpu_block_pool(self, gpu_block_pool: "BlockPool") -> None:
        """Take the engine's block pool, to hold what is being saved."""
        self._pool.pool = gpu_block_pool

    # ------------------------------------------------------------------------- scheduler's side

    @harmless(lambda *_, **__: None)
    def on_new_request(self, request: Any) -> None:
        """Look the prompt up early."""
        if self._scheduler:
            self._scheduler.arrived(request)

    @harmless(lambda *_, **__: MISS)
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return how many more tokens will be loaded (None: not known yet), and whether asynchronously."""
        return self._scheduler.matched_tokens(request, num_computed_tokens) if self._scheduler else MISS

    @harmless(lambda *_, **__: None)
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Plan the load into the blocks that the engine has allocated."""
        if self._scheduler:
            self._scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)

    @harmless(lambda *_: {})
    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[Any, int]:
        """Return where the promised tokens were found."""
        if not self._scheduler:
            return {}
        sources = self._scheduler.hit_sources(request, num_external_tokens)
        return {SOURCES[source]: number for source, number in sources.items()}

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Return the step's plan for the workers."""
        plan = StepPlan()
        if self._scheduler is None:
            self._has_asked = True
            return KvtierMetadata(plan, asks=not self._has_met)
        try:
            # Block tables and states are looked up late: the loads are in the plan before anything can fail.
            tables = partial(self._tables.table, scheduler_output)
            states = partial(states_of, scheduler_output)
            self._scheduler.plan(plan, scheduler_output.num_scheduled_tokens, tables, states)
            self._tables.take_in(scheduler_output)
        except Exception:
            self._tables.forget()
            self.guard.defect("build_connector_meta")
        self._loading.begin(plan.loads)
        return KvtierMetadata(plan)

    @harmless(lambda *_, **__: None)
    def update_connector_output(self, connector_output: Any) -> None:
        """Take what the workers have reported in this step."""
        told = connector_output.kv_connector_worker_meta
        if not self._has_met:
            handshakes = told.handshakes if isinstance(told, KvtierWorkerMetadata) else {}
            self._meet([handshakes[rank] for rank in sorted(handshakes)])
        if not self._scheduler:
            return
        failed = self._loading.failed(connector_output)
        self._scheduler.loaded(connector_output.finished_recving or (), failed)
        if isinstance(told, KvtierWorkerMetadata):
            self._scheduler.saved(told.acks)

    @harmless(lambda *_, **__: None)
    def _announce(self, stored: StoredBlocks) -> None:
        """Tell the engine's listeners of blocks that every rank has stored, from now on."""
        if self._agent and self._announcer and self._scheduler:
            blocks = blocks_of(stored, self._groups[stored.group], self._scheduler.salt, self._announcer)
            if blocks:
                self._agent.announce(blocks)

    @harmless(lambda *_, **__: (False, None))
    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """As `request_finished_all_groups`, of an engine with one KV cache group."""
        return self.request_finished_all_groups(request, (block_ids,))

    @harmless(lambda *_, **__: (False, None))
    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Save what is left; return False: the blocks may be freed. Beside that what decode is to be told."""
        return False, self._scheduler.finished(request, block_ids) if self._scheduler else None

    @harmless(lambda *_: ())
    def take_events(self) -> Iterable[KVCacheEvent]:
        """Return where blocks are stored now, as changes since the last call, for the engine's listeners."""
        if self._announcer is None:
            return ()
        return events_of(self._announcer.take(), self._groups, self._kinds)

    @harmless(lambda *_, **__: False)
    def has_pending_push_work(self) -> bool:
        """Whether the engine must step although no request runs: for saves, or to meet the workers."""
        if self._scheduler is None:
            return not (self._has_met or self._has_asked or self._why_dark)
        return self._scheduler.is_busy

    @harmless(lambda *_, **__: False)
    def reset_cache(self) -> bool | None:
        """Find nothing any more that was stored before; return True."""
        if self._scheduler:
            self._scheduler.reset(uuid.uuid4().hex)
        if self._announcer:
            self._announcer.clear()
        return True

    # ---------------------------------------------------------------------------- worker's side

    def _told(self) -> KvtierMetadata:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, KvtierMetadata)
        return metadata

    def _plan(self) -> StepPlan:
        return self._told().plan

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Take the step's plan, before the forward pass."""
        super().bind_connector_metadata(connector_metadata)
        self._step_began_at = time.monotonic()  # of the monotonic clock, in s: the forward pass comes next

    @harmless(lambda *_, **__: None)
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Start the step's loads."""
        if self._worker and (plan := self._plan()).loads:
            self._loading.begin(plan.loads)
            try:
                self._worker.start_loads(plan)
            except Exception:
                self.guard.defect("start_load_kv")
                self._worker.fail_loads(plan)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Return at once: a request runs when all its layers are loaded."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Return at once: a block is saved when all its layers are computed."""

    @harmless(lambda *_, **__: None)
    def wait_for_save(self) -> None:
        """Start the step's saves; does not wait for them."""
        if self._worker and (plan := self._plan()).saves:
            try:
                self._worker.start_saves(plan, time.monotonic() - self._step_began_at)
            except Exception:
                self.guard.defect("wait_for_save")
                self._worker.drop_saves(plan)

    @harmless(lambda *_: TransferResults())
    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Return the requests with loads that have ended, and those that failed."""
        if not self._worker:
            return TransferResults()
        finished, failed = self._worker.take_loaded()
        return TransferResults(finished_recving=finished, failed_recving=failed)

    @harmless(lambda *_, **__: (None, None))
    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return no sends and the ended loads; asked instead of `get_transfer_results` before 0.30."""
        results = self.get_transfer_results(finished_req_ids)
        self._lost_blocks |= self._loading.lost(results.finished_recving, results.failed_recving)
        return None, results.finished_recving

    @harmless(lambda *_, **__: set())
    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks of failed loads that `get_finished` has returned since the last call."""
        lost, self._lost_blocks = self._lost_blocks, set()
        return lost

    @harmless(lambda *_, **__: None)
    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Return the saves that have ended, and the namespaces if asked, for the scheduler."""
        acks = self._worker.take_acks() if self._worker else Acks()
        asked = self.has_connector_metadata() and self._told().asks
        handshakes = {self._vllm_config.parallel_config.rank: self._handshake()} if asked else {}
        return KvtierWorkerMetadata(acks, handshakes) if acks.by_job or handshakes else None

    # -------------------------------------------------------------------------------- both sides

    @harmless(lambda *_, **__: None)
    def get_kv_connector_stats(self) -> KvtierStats | None:
        """Return what was counted since the last step."""
        counted = self.counters.take()
        return KvtierStats(data=counted) if counted else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvtierStats:
        """Return counts that another process has sent."""
        return KvtierStats(data=data or {})

    @classmethod
    def build_prom_metrics(cls, *arguments: Any) -> KvtierPromMetrics:
        """Return the Prometheus counters of the front end."""
        return KvtierPromMetrics(*arguments)

    @harmless(lambda *_, **__: None)
    def shutdown(self) -> None:
        """Stop all threads and disconnect."""
        for side in (self._agent, self._worker):
            if side is not None:
                side.close()
