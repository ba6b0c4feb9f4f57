"""Setups: what to replay a trace on. Policies and capacities by the words of the command line.

lru                    eviction `lru`, everything admitted
lru+tinylfu            eviction and admission, by their names in policies/registry.py
urgency                eviction and admission, where both are registered under one name
urgency@forecast       and a prefetcher
unbounded              room for every block of the trace: what no policy can exceed but by prefetching
policy.yaml            the `policy` section of a settings file

5%  64GiB              capacity: a share of the trace's distinct blocks, or bytes

glm-5:fp8  32x8x128    model: of the catalogue (models.py), or layers, KV heads and head dimension
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from ...policies.costs import PrefillModel
from ...policies.registry import ADMISSION, EVICTION, PREFETCH, PolicyChoice, UnknownPolicy, resolve
from ...tiers.block import Geometry, NamespaceIdentity, Tier
from ...tiers.ladder import STANDARD, Ladder
from ...v1.errors import InvalidRequest
from ...v1.shm import slot_bytes_for
from ..config import Settings, units
from ..core.options import PlannerOptions
from . import models
from .traces import MIN_GAP_S, Trace, TraceNamespace
from .virtual import cold_room_bytes
from .virtual_store import StoreModel

UNBOUNDED = "unbounded"
#: Untimed, a put waits only while room is being made; this is less than the time between two requests.
PUT_WAIT_S = MIN_GAP_S / 2
#: Llama-3-8B in 16 bits: 128 KiB a token. What a trace is taken to be of when it does not say.
DEFAULT_SHAPE = (32, 8, 128, "float16")  # layers, KV heads, head dim, dtype


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Shape of the model that the blocks are KV of: it gives their bytes."""

    num_layers: int = DEFAULT_SHAPE[0]
    num_kv_heads: int = DEFAULT_SHAPE[1]
    head_dim: int = DEFAULT_SHAPE[2]
    dtype: str = DEFAULT_SHAPE[3]
    layers_per_group: int = 0
    token_bytes: int = 0  # of all layers, where they are not alike; 0: what the fields above give
    prefill: PrefillModel | None = None  # None: as the planner guesses from the geometry

    @classmethod
    def parse(cls, text: str, layers_per_group: int = 0, prefill_tokens_per_s: float = 0.0) -> "ModelShape":
        """Read NAME[:fp8] of the catalogue or LAYERSxHEADSxDIM[:DTYPE].

        `prefill_tokens_per_s`: at the start of a context; 0: of the model's FLOPs. Raises ValueError."""
        named = models.find(text)
        shape = _named(*named, prefill_tokens_per_s) if named else cls._of_numbers(text)
        if prefill_tokens_per_s and not named:
            shape = replace(shape, prefill=PrefillModel(prefill_tokens_per_s))
        shape = replace(shape, layers_per_group=layers_per_group)
        shape.geometry(TraceNamespace(1))
        return shape

    @classmethod
    def _of_numbers(cls, text: str) -> "ModelShape":
        numbers, _, dtype = text.partition(":")
        try:
            layers, heads, dim = map(int, numbers.split("x"))
        except ValueError:
            raise ValueError(
                f"{text!r} is no model shape; write LAYERSxHEADSxDIM, e.g. 32x8x128:float16"
            ) from None
        return cls(layers, heads, dim, dtype or "float16")

    def geometry(self, namespace: TraceNamespace) -> Geometry:
        """Return the geometry of a namespace: of its bytes, when it says only these. Raises ValueError."""
        try:
            return self._geometry(namespace)
        except InvalidRequest as error:  # its text begins with a reason, which is for programs
            raise ValueError(error.message) from None

    def _geometry(self, namespace: TraceNamespace) -> Geometry:
        tokens = namespace.block_tokens
        block_bytes = namespace.block_bytes or self.token_bytes * tokens
        if block_bytes:
            # As many layers as the model has: what a recording does not say is how long their prefill takes.
            layers = self.num_layers if block_bytes % (tokens * self.num_layers) == 0 else 1
            if block_bytes % tokens:
                raise ValueError(f"blocks of {block_bytes} bytes do not divide into {tokens} tokens")
            layer_bytes = block_bytes // tokens // layers
            return Geometry(
                layers,
                1,
                layer_bytes,
                tokens,
                "int8",
                layers_per_group=self.layers_per_group if layers == self.num_layers else 0,
                num_planes=1,
            )
        return Geometry(
            self.num_layers,
            self.num_kv_heads,
            self.head_dim,
            tokens,
            self.dtype,
            layers_per_group=self.layers_per_group,
        )


def _named(model: models.CataloguedModel, precision: str, prefill_tokens_per_s: float) -> ModelShape:
    """Return the shape of a model of the catalogue."""
    return ModelShape(
        num_layers=model.num_layers,
        token_bytes=model.token_bytes(precision),
        prefill=model.prefill(prefill_tokens_per_s),
    )


@dataclass(frozen=True, slots=True)
class Setup:
    """One planner to replay on: policies and tiers. Picklable: it may run in another process."""

    policy: str
    capacity: str
    choice: PolicyChoice
    capacity_bytes: Mapping[Tier, int]
    options: PlannerOptions
    shape: ModelShape = field(default_factory=ModelShape)
    #: Copies take their time on a virtual clock, and so does prefill.
    is_timed: bool = False
    ladder: Ladder = STANDARD
    store: StoreModel | None = None  # an object store under the tiers

    @property
    def label(self) -> str:
        """Return the name of this setup in tables."""
        return f"{self.policy} {self.capacity}"


def identities_of(trace: Trace, shape: ModelShape) -> list[NamespaceIdentity]:
    """Return an identity per namespace of the trace. Raises ValueError."""
    geometries = [shape.geometry(namespace) for namespace in trace.namespaces]
    return [
        NamespaceIdentity(b"replay".ljust(16), geometry, shard=str(i))
        for i, geometry in enumerate(geometries)
    ]


def block_slot_bytes(geometry: Geometry) -> int:
    """Return what one block takes in a memory tier."""
    return sum(slot_bytes_for(size) for size in geometry.fragment_bytes)


def distinct_bytes(trace: Trace, shape: ModelShape) -> int:
    """Return what all distinct blocks of the trace take in a memory tier."""
    sizes = [block_slot_bytes(shape.geometry(namespace)) for namespace in trace.namespaces]
    if len(sizes) == 1:
        return trace.num_blocks * sizes[0]
    return sum(sizes[namespace] for namespace in trace.block_namespace().tolist())


def unbounded_bytes(trace: Trace, shape: ModelShape) -> int:
    """Return a capacity in bytes at which no block is ever evicted; more would only cost memory."""
    geometries = {shape.geometry(namespace) for namespace in trace.namespaces}
    # An extent is of one slot size: what is cut off of each is less than half of it, and the last of a size
    # may hold a single slot.
    return distinct_bytes(trace, shape) * (1 if len(geometries) == 1 else 4)


def capacity_of(text: str, trace: Trace, shape: ModelShape) -> int:
    """Return the bytes that `5%` or `64GiB` mean for this trace. Raises ValueError."""
    if not text.endswith("%"):
        num_bytes = units.parse_bytes(text)
        require_room({Tier.DRAM: num_bytes}, trace, shape)
        return num_bytes
    share = units.parse_fraction(text)
    if not share:
        raise ValueError(f"{text!r} is no room at all")
    if len(trace.namespaces) == 1:  # whole blocks
        size = block_slot_bytes(shape.geometry(trace.namespaces[0]))
        return max(1, round(share * trace.num_blocks)) * size
    return max(largest_block_bytes(trace, shape), int(share * distinct_bytes(trace, shape)))


def largest_block_bytes(trace: Trace, shape: ModelShape) -> int:
    """Return what a block of the trace takes in a memory tier, at most."""
    return max(block_slot_bytes(shape.geometry(namespace)) for namespace in trace.namespaces)


def require_room(
    capacity_bytes: Mapping[Tier, int], trace: Trace, shape: ModelShape, ladder: Ladder = STANDARD
) -> None:
    """Raise ValueError when a tier would be larger than it is asked to be, because it holds too little."""
    least_bytes = largest_block_bytes(trace, shape)
    geometries = [shape.geometry(namespace) for namespace in trace.namespaces]
    for tier, num_bytes in capacity_bytes.items():
        needed_bytes = cold_room_bytes(geometries) if tier == ladder.log_tier else least_bytes
        if num_bytes < needed_bytes:
            raise ValueError(
                f"{tier.label} of {units.format_bytes(num_bytes)} is too small for blocks of "
                f"{units.about_bytes(least_bytes)}; it takes at least {units.about_bytes(needed_bytes)}, or "
                "name the model of the blocks with --model"
            )


def choice_of(text: str) -> PolicyChoice:
    """Return the policies that a word of the command line names. Raises UnknownPolicy, SettingsError."""
    if text.endswith((".yaml", ".yml")):
        return Settings.load(Path(text), {}).policy.choice()
    text, _, prefetch = text.partition("@")
    eviction, _, admission = text.partition("+")
    if eviction == UNBOUNDED:
        if admission or prefetch:
            raise UnknownPolicy(f"{UNBOUNDED} is room for everything and nothing else; write it alone")
        eviction = "lru"
    if not admission:
        admission = eviction if eviction in ADMISSION else "all"
    resolve(EVICTION, eviction)
    resolve(ADMISSION, admission)
    if prefetch:
        resolve(PREFETCH, prefetch)
    return PolicyChoice(eviction, admission, prefetch)


def single_tier(policy: str, capacity: str, trace: Trace, shape: ModelShape) -> Setup:
    """Return one memory tier of this capacity, used to the last byte, where nothing waits."""
    num_bytes = unbounded_bytes(trace, shape)
    if policy != UNBOUNDED:
        num_bytes = min(num_bytes, capacity_of(capacity, trace, shape))
    options = PlannerOptions(
        max_story_lines=1,
        high_watermark=1.0,
        low_watermark=1.0,
        put_wait_s=PUT_WAIT_S,
    )
    return Setup(policy, capacity, choice_of(policy), {Tier.DRAM: num_bytes}, options, shape)


def tiers_of(name: str, settings: Settings, trace: Trace, shape: ModelShape) -> Setup:
    """Return the policies, tiers, limits and watermarks of settings, on the virtual clock.

    Raises ValueError when a tier is too small for the trace's blocks.
    """
    ladder = settings.tiers.ladder
    capacity = {tier: size.capacity_bytes for tier, size in settings.tiers.sizes.items()}
    text = ", ".join(f"{tier.label} {units.about_bytes(size)}" for tier, size in capacity.items())
    require_room(capacity, trace, shape, ladder)
    choice, options = settings.policy.choice(), settings.planner_options()
    return Setup(name, text, choice, capacity, options, shape, is_timed=True, ladder=ladder)
