"""Everything that decides a training run, as frozen dataclasses for `laneformer_jax.settings`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from data import DataConfig
from laneformer_jax.config import LaneformerConfig
from laneformer_jax.presets import preset

_MOST_STEPS = 2**31 - 1  # updates are counted in int32, on the devices and in optax


@dataclass(frozen=True)
class ModelConfig:
    """A new model: a preset with some fields replaced.

    Attributes:
        preset: a name of `laneformer_jax.presets`.
        overrides: fields of LaneformerConfig, such as `{num_hidden_layers: 4}`.
        residual_init_scale: factor on the initial weights that write into the residual stream (wo, w2);
            GPT-2's is 1/√(2 · layers), the public reference's 1.
    """

    preset: str = "tiny"
    overrides: dict[str, Any] = field(default_factory=dict)
    residual_init_scale: float = 1.0

    def __post_init__(self) -> None:
        self.build()
        if not 0 < self.residual_init_scale <= 1:
            raise ValueError(
                f"residual_init_scale = {self.residual_init_scale}: must be above 0, at most 1"
            )

    def build(self) -> LaneformerConfig:
        """The model's config. Raises UserError for an unknown name or an impossible combination."""
        return preset(self.preset, **self.overrides)


@dataclass(frozen=True)
class TrainConfig:
    """Sizes of the run.

    Attributes:
        steps: optimizer updates.
        batch_size: rows of one update, over all devices and microbatches.
        seq_len: tokens of a row.
        accumulate: microbatches that one update is cut into; the result does not depend on it.
        compute_dtype: of activations and of the weights they meet; masters stay float32.
        remat: what the backward pass computes again instead of keeping it: `none`; `layer`: all but
            the inputs of a layer's two modules; `attention`: all but those and what attention gave;
            `offload`: as `layer`, with the inputs in host memory.
        seed: of initialisation and data order.
    """

    steps: int = 1000
    batch_size: int = 8
    seq_len: int = 256
    accumulate: int = 1
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    remat: Literal["none", "layer", "attention", "offload"] = "none"
    seed: int = 0

    def __post_init__(self) -> None:
        _positive(self, "steps", "batch_size", "seq_len", "accumulate")
        if self.steps > _MOST_STEPS:
            raise ValueError(f"steps = {self.steps}: must be at most {_MOST_STEPS}")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed = {self.seed}: must be from 0 to 2**32 - 1")
        if self.batch_size % self.accumulate:
            raise ValueError(
                f"accumulate = {self.accumulate}: must divide batch_size {self.batch_size}"
            )


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW or Muon with decoupled decay; norms and embeddings do not decay.

    Attributes:
        name: `adamw`; `muon`: for the layers' matrices, with AdamW for the rest, at the same
            learning rate.
        learning_rate: the schedule's peak.
        weight_decay: multiplied by the learning rate, as in optax and PyTorch.
        clip_norm: largest global norm of the gradient; null: not clipped.
        z_loss: weight of (log Σ exp(logits))² in what is minimised; the reported loss is without it.
        muon_momentum: weight of the past in Muon's momentum.
        skip_spikes: skip an update whose gradient's norm exceeds so many times its running mean;
            null: only where it is not finite.
        stop_after_skips: give up after so many skipped updates in a row.
        ema: weight of the past in a running mean of the parameters; null: none is kept.
    """

    name: Literal["adamw", "muon"] = "adamw"

    learning_rate: float = 3e-3
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float | None = 1.0
    z_loss: float = 0.0
    muon_momentum: float = 0.95
    skip_spikes: float | None = None
    stop_after_skips: int = 10
    ema: float | None = None

    def __post_init__(self) -> None:
        for name in ("learning_rate", "eps", "clip_norm"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} = {value}: must be a positive number")
        for name in ("b1", "b2", "muon_momentum", "ema"):
            if getattr(self, name) is not None and not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: must be at least 0 and below 1")
        for name in ("weight_decay", "z_loss"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise ValueError(
                    f"{name} = {getattr(self, name)}: must be a finite number, at least 0"
                )
        if self.skip_spikes is not None and not self.skip_spikes > 1:
            raise ValueError(f"skip_spikes = {self.skip_spikes}: must be above 1")
        _positive(self, "stop_after_skips")


@dataclass(frozen=True)
class ScheduleConfig:
    """Learning rate over the run, relative to the peak.

    Attributes:
        kind: `wsd`: warm up, stay, decay linearly; `cosine`, `linear`: decay from the end of the
            warm-up to the last step.
        warmup_steps: update number `warmup_steps` is the first at the peak.
        warmup_tokens: the same in tokens, rounded up to whole updates; instead of `warmup_steps`.
        decay_steps: the last so many updates of `wsd` decay.
        final: of the last update, relative to the peak.
    """

    kind: Literal["wsd", "cosine", "linear"] = "wsd"
    warmup_steps: int = 0
    warmup_tokens: int = 0
    decay_steps: int = 0
    final: float = 0.1

    def __post_init__(self) -> None:
        if self.warmup_steps and self.warmup_tokens:
            raise ValueError(
                f"warmup_tokens = {self.warmup_tokens}: leave it out with warmup_steps"
                f" {self.warmup_steps}"
            )
        for name in ("warmup_steps", "warmup_tokens", "decay_steps"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} = {getattr(self, name)}: must be at least 0")
        if self.kind != "wsd" and self.decay_steps:
            raise ValueError(
                f"decay_steps = {self.decay_steps}: only for kind wsd; {self.kind} decays from the"
                " warm-up on"
            )
        if not 0 <= self.final <= 1:
            raise ValueError(f"final = {self.final}: must be from 0 to 1")

    def warmup(self, tokens: int) -> int:
        """Updates of the warm-up, of so many tokens each."""
        return self.warmup_steps or -(-self.warmup_tokens // tokens)


@dataclass(frozen=True)
class MeshConfig:
    """How the devices stand: data × fsdp × lane of them.

    Attributes:
        data: share the rows of a batch; each repeats parameters and optimizer state.
        fsdp: share the rows, and parameters and optimizer state, which are gathered layer by layer.
        lane: share the lanes, and with them the layers' parameters.
    """

    data: int = 1
    fsdp: int = 1
    lane: int = 1

    def __post_init__(self) -> None:
        _positive(self, "data", "fsdp", "lane")


@dataclass(frozen=True)
class CheckpointConfig:
    """When checkpoints are written and which stay.

    Attributes:
        interval: updates between two; the last update is always saved.
        keep: how many of the newest stay.
        keep_every: steps whose multiples stay for good; null: none.
    """

    interval: int = 200
    keep: int = 2
    keep_every: int | None = None

    def __post_init__(self) -> None:
        _positive(self, "interval", "keep", "keep_every")


@dataclass(frozen=True)
class WandbConfig:
    """Where Weights & Biases gets the metrics; `mode: offline` needs no key and no network."""

    project: str = "laneformer"
    name: str | None = None
    mode: Literal["online", "offline"] = "online"


@dataclass(frozen=True)
class LogConfig:
    """Metrics go to `metrics.jsonl` every `interval` updates; with `tensorboard` also to the folder of that
    name in the run's, and to wandb when it is given. All get the same records."""

    interval: int = 1
    tensorboard: bool = False
    wandb: WandbConfig | None = None

    def __post_init__(self) -> None:
        _positive(self, "interval")


@dataclass(frozen=True)
class EvalConfig:
    """Loss on held-out documents.

    Attributes:
        interval: updates between two evaluations, and one at the end; null: none at all.
        batches: at most so many batches each time; null: all held-out documents.
        sources: names of the sources to read; null: all that hold documents out.
    """

    interval: int | None = None
    batches: int | None = None
    sources: list[str] | None = None

    def __post_init__(self) -> None:
        _positive(self, "interval", "batches")


@dataclass(frozen=True)
class BenchmarksConfig:
    """Benchmarks of saved checkpoints, in a process beside training (`eval.inloop`).

    The checkpoint is asked through its chat template in phase sft, else to continue the prompt. An
    evaluation that falls due while the one before it still runs is left out.

    Attributes:
        interval: updates between two, and one at the end; a checkpoint is saved for each. null: none.
        suites: as `laneformer evaluate --suite`, such as `humaneval+`, `mbpp+=PATH`, `ppl=PATH`.
        limit: first tasks (documents) of each suite; null: all.
        max_new_tokens: longest answer.
        environment: variables of the process; by default it leaves the accelerator to training.
    """

    interval: int | None = None
    suites: list[str] = field(default_factory=lambda: ["humaneval+"])
    limit: int | None = 20
    max_new_tokens: int = 768
    environment: dict[str, str] = field(default_factory=lambda: {"JAX_PLATFORMS": "cpu"})

    def __post_init__(self) -> None:
        _positive(self, "interval", "limit", "max_new_tokens")
        if self.interval is not None:
            from eval.inloop import check_suites

            check_suites(self.suites)


@dataclass(frozen=True)
class RunConfig:
    """One phase of training.

    Attributes:
        phase: what logs and reports call it.
        model: a new model; null: the model of `init_from`.
        init_from: a run, a native checkpoint or a Hugging Face folder whose parameters to start
            from. Optimizer, step and data order start fresh.
        tokenizer: a tokenizer file, or a folder that holds one; null: that of `init_from`.
    """

    phase: Literal["pretrain", "midtrain", "sft"] = "pretrain"
    model: ModelConfig | None = None
    init_from: str | None = None
    tokenizer: str | None = None
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    benchmarks: BenchmarksConfig = field(default_factory=BenchmarksConfig)

    def __post_init__(self) -> None:
        if self.model is None and self.init_from is None:
            raise ValueError("model: required without init_from, such as model.preset=tiny")
        if self.model is not None and self.init_from is not None:
            raise ValueError("model: leave it out with init_from, whose checkpoint says what it is")
        if self.tokenizer is None and self.init_from is None:
            raise ValueError("tokenizer: required without init_from; a file or folder")
        parts = self.train.accumulate * self.mesh.data * self.mesh.fsdp
        if self.train.batch_size % parts:
            raise ValueError(
                f"train.batch_size = {self.train.batch_size}: cut into {self.train.accumulate}"
                f" microbatches it must be divisible by mesh.data {self.mesh.data} × mesh.fsdp"
                f" {self.mesh.fsdp}; the nearest is {nearest_multiple(self.train.batch_size, parts)}"
            )
        warmup = self.schedule.warmup(self.train.batch_size * self.train.seq_len)
        planned = warmup + self.schedule.decay_steps
        if planned > self.train.steps:
            raise ValueError(
                f"schedule: warm-up and decay_steps = {planned} exceed"
                f" train.steps {self.train.steps}"
            )


def nearest_multiple(value: int, of: int) -> int:
    """The multiple of `of`, from `of` itself, that is nearest to `value`."""
    return of * max(1, round(value / of))


def _positive(config: Any, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if value is not None and value < 1:
            raise ValueError(f"{name} = {value}: must be at least 1")
