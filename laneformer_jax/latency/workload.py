"""What one decoded token reads at batch one, phase by phase, for the whole model.

A phase is a stretch of work whose parts need nothing from each other: within a layer the projections
to queries, keys and values; the cached keys and values; the output projection; the MLP's gate and up;
its down projection. Between two phases every compute unit of a device waits for all others.
"""

from __future__ import annotations

from dataclasses import dataclass

from laneformer_jax import costs
from laneformer_jax.config import ATTENTION, MLP, LaneformerConfig


@dataclass(frozen=True)
class Phase:
    """Bytes and FLOPs of one phase, all devices together.

    `shared_bytes` are read by every device (norm scales), the others are split among them.
    """

    name: str
    weight_bytes: float = 0.0
    kv_bytes: float = 0.0
    shared_bytes: float = 0.0
    flops: float = 0.0

    def bytes_per_device(self, devices: int) -> float:
        return (self.weight_bytes + self.kv_bytes) / devices + self.shared_bytes


@dataclass(frozen=True)
class Module:
    """One attention or MLP; its output is summed across lanes after its last phase."""

    layer: int
    name: str  # ATTENTION or MLP
    phases: tuple[Phase, ...]


@dataclass(frozen=True)
class Workload:
    """One token: embedding row, modules in order, head.

    Attributes:
        config: whose rules say when lanes hear each other; sizes are in the phases.
        context: positions in the cache, the token's own included.
        sum_bytes: of one vector that lanes sum.
        last_sum: whether the streams are summed once more before the head.
        logits_sum_bytes: of logits that lanes sum after the head; 0 when each holds its own share.
    """

    name: str
    config: LaneformerConfig
    context: int
    embedding: Phase
    modules: tuple[Module, ...]
    head: Phase
    sum_bytes: float
    last_sum: bool
    logits_sum_bytes: float

    @property
    def phases(self) -> tuple[Phase, ...]:
        inner = (phase for module in self.modules for phase in module.phases)
        return (self.embedding, *inner, self.head)

    @property
    def weight_bytes(self) -> float:
        """Weights read per token, each counted once."""
        return sum(phase.weight_bytes + phase.shared_bytes for phase in self.phases)

    @property
    def kv_bytes(self) -> float:
        return sum(phase.kv_bytes for phase in self.phases)

    def bytes_per_device(self, devices: int) -> float:
        return sum(phase.bytes_per_device(devices) for phase in self.phases)


def from_config(
    config: LaneformerConfig, context: int, weight_bits: int = 16, name: str = ""
) -> Workload:
    """The workload of a Laneformer.

    Keys, values and sums are 16-bit whatever the weights are. All weights but the embedding table
    are read once, the head by rows that the devices share (`costs.decode_weight_bytes`).
    """
    d, h, kv = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
    size, scale = config.head_size, weight_bits / 8
    norm = 2.0 * d * (1 if config.replicated_rmsn_scale else config.num_lanes)
    heads_norm = 4.0 * size * config.qk_norm
    positions = [min(config.window(i) or context, context) for i in range(config.num_hidden_layers)]
    modules: list[Module] = []
    for layer, seen in enumerate(positions):
        attention = (
            _matrix("qkv", d * (h + 2 * kv) * size, scale, norm + heads_norm),
            Phase(
                "attend",
                kv_bytes=costs.kv_bytes_per_position(config) * seen,
                flops=4.0 * h * size * seen,
            ),
            _matrix("out", d * h * size, scale),
        )
        mlp = (
            _matrix("gate_up", 2 * d * config.intermediate_size, scale, norm),
            _matrix("down", d * config.intermediate_size, scale),
        )
        modules += [Module(layer, ATTENTION, attention), Module(layer, MLP, mlp)]
    head_type = config.lm_head_type
    columns = d * (config.num_lanes if head_type == "lane" else 1)
    last_norm = 2.0 * d if config.pre_norm_lane_agg else norm
    return Workload(
        name=name,
        config=config,
        context=context,
        embedding=Phase("embedding", shared_bytes=2.0 * d),
        modules=tuple(modules),
        head=_matrix("head", config.vocab_size * columns, scale, last_norm),
        sum_bytes=2.0 * d,
        last_sum=head_type == "replicate",
        logits_sum_bytes=4.0 * config.vocab_size if head_type == "lane" else 0.0,
    )


def mixture_of_experts(
    active_bytes: float,
    layers: int,
    hidden_size: int,
    expert_share: float = 0.7,
    name: str = "",
    num_lanes: int = 8,
    delay: int = 2,
) -> Workload:
    """A mixture of experts known by the bytes of its active weights.

    Every expert's neurons are split over all devices, as an MLP's are: no tokens travel, but the
    router is a phase of its own. KV is left out. `expert_share` of the bytes are experts'.
    """
    config = LaneformerConfig(
        hidden_size=hidden_size,
        num_hidden_layers=layers,
        num_lanes=num_lanes,
        broadcast_delay=delay,
        head_dim=128,
        use_early_comm=False,
    )
    experts = active_bytes * expert_share / layers
    others = active_bytes * (1 - expert_share) / (layers + 1)  # the head is taken as one layer's

    def read(name: str, count: float) -> Phase:
        return Phase(name, weight_bytes=count, flops=2 * count)

    modules: list[Module] = []
    for layer in range(layers):
        attention = (read("qkv", others / 2), Phase("attend"), read("out", others / 2))
        mlp = (Phase("route"), read("gate_up", experts * 2 / 3), read("down", experts / 3))
        modules += [Module(layer, ATTENTION, attention), Module(layer, MLP, mlp)]
    return Workload(
        name=name,
        config=config,
        context=1,
        embedding=Phase("embedding", shared_bytes=2.0 * hidden_size),
        modules=tuple(modules),
        head=read("head", others),
        sum_bytes=2.0 * hidden_size,
        last_sum=True,
        logits_sum_bytes=0.0,
    )


def stream(weight_bytes: float, name: str = "") -> Workload:
    """Nothing but `weight_bytes` to read: what a bandwidth ceiling counts."""
    return Workload(
        name=name,
        config=LaneformerConfig(),
        context=0,
        embedding=Phase("embedding"),
        modules=(),
        head=Phase("stream", weight_bytes=weight_bytes),
        sum_bytes=0.0,
        last_sum=False,
        logits_sum_bytes=0.0,
    )


def _matrix(name: str, parameters: float, scale: float, norm_bytes: float = 0.0) -> Phase:
    return Phase(
        name,
        weight_bytes=scale * parameters,
        shared_bytes=norm_bytes,
        flops=2.0 * parameters,
    )
