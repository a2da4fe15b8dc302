"""What a Laneformer is: one frozen dataclass under the Hugging Face field names, checked when it is built."""

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, Self

from laneformer_jax.errors import UserError, nearest, warn_of_misspellings
from laneformer_jax.files import read_json

ATTENTION, MLP = "attention", "mlp"
HEAD_TYPES = ("replicate", "lane", "vocab_parallel")
OWN_SCALES = ("one", "sqrt_lanes")
_COUNT = "a positive integer below 2**31"  # sizes are int32 on every device
_MOST_LAYERS = 10_000  # every layer is compiled


@dataclass(frozen=True)
class RopeScaling:
    """Llama-3 frequency scaling: wavelengths beyond the original context are stretched by `factor`."""

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    rope_type: str = "llama3"

    def __post_init__(self) -> None:
        if self.rope_type != "llama3":
            raise UserError(
                f"rope_scaling.rope_type: {self.rope_type!r} is not supported; allowed: 'llama3'"
            )
        for name in ("factor", "low_freq_factor", "high_freq_factor"):
            if not _is_finite(getattr(self, name)):
                _refuse(f"rope_scaling.{name}", getattr(self, name), "a finite number")
        if not _is_count(self.original_max_position_embeddings):
            _refuse(
                "rope_scaling.original_max_position_embeddings",
                self.original_max_position_embeddings,
                _COUNT,
            )
        if self.factor < 1:
            raise UserError(f"rope_scaling.factor: {self.factor} must be at least 1")
        if not self.high_freq_factor > self.low_freq_factor > 0:
            raise UserError(
                f"rope_scaling.high_freq_factor: {self.high_freq_factor} must exceed "
                f"low_freq_factor {self.low_freq_factor}, which must be positive"
            )


@dataclass(frozen=True)
class LaneformerConfig:
    """Shapes and rules of one model. Defaults are the reference implementation's behaviour.

    Both generations of the public `config.json` load through `from_dict` and come back from `to_dict`
    with every key they had: the older one says `sliding_window_n_layers` (negative: the last |k| layers),
    `unclamped_layers` and `use_comm`; the newer one `swa_layers`, `use_attention_comm`, `use_mlp_comm`.
    Read the resolved rule through `window(layer)` and `communicates(module)`.

    Raises:
        UserError: an impossible value or combination, naming the field, the value and what is allowed.
    """

    vocab_size: int = 32000
    hidden_size: int = 3072
    intermediate_size: int = 12288
    num_hidden_layers: int = 15
    num_attention_heads: int = 32
    num_key_value_heads: int = 16
    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    qk_norm: bool = False  # RMSNorm on each query and key head, as in Qwen3
    max_position_embeddings: int = 4096
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    initializer_range: float = 0.02

    num_lanes: int = 8
    broadcast_delay: int = 2  # δ, in layers
    use_early_comm: bool = True
    early_broadcast: bool = True  # layers summed at once also queue their partials
    final_own_scale: Literal["one", "sqrt_lanes"] = "one"  # own output of the last δ layers
    # Ladder Residual (arXiv 2501.06589) in place of delay: a module reads the stream without the sum of
    # the module before it, which is in flight. Ours; delay and early mode then mean nothing.
    ladder_residual: bool = False
    use_comm: bool | None = None  # older: both modules at once; None: on
    use_attention_comm: bool | None = None  # newer: None follows use_comm
    use_mlp_comm: bool | None = None

    sliding_window: int | None = None
    sliding_window_n_layers: int = 0  # older
    unclamped_layers: tuple[int, ...] | None = None  # older
    swa_layers: tuple[int, ...] | None = None  # newer

    lm_head_type: Literal["replicate", "lane", "vocab_parallel"] = "replicate"
    pre_norm_lane_agg: bool = False
    replicated_rmsn_scale: bool = True
    tie_word_embeddings: bool = False

    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int | None = None
    # Keys of a config.json that are not ours (architectures, auto_map, …), kept word for word.
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for name in ("unclamped_layers", "swa_layers", "eos_token_id"):
            value = getattr(self, name)
            if isinstance(value, list):
                object.__setattr__(self, name, tuple(value))
        if isinstance(self.rope_scaling, Mapping):
            object.__setattr__(self, "rope_scaling", _rope_scaling(self.rope_scaling))
        elif not isinstance(self.rope_scaling, RopeScaling | None):
            _refuse("rope_scaling", self.rope_scaling, "a mapping with a factor, or null")
        self._check_values()
        self._check_combinations()

    def _check_values(self) -> None:
        for name in (
            "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
            "num_key_value_heads max_position_embeddings num_lanes"
        ).split():
            if not _is_count(getattr(self, name)):
                _refuse(name, getattr(self, name), _COUNT)
        if self.num_hidden_layers > _MOST_LAYERS:
            _refuse("num_hidden_layers", self.num_hidden_layers, f"at most {_MOST_LAYERS}")
        if not _is_int(self.broadcast_delay) or self.broadcast_delay < 1:
            _refuse("broadcast_delay", self.broadcast_delay, "1 layer or more")
        for name in ("norm_eps", "rope_theta", "initializer_range"):
            value = getattr(self, name)
            if not _is_finite(value) or value <= 0:
                _refuse(name, value, "a positive, finite number")
        for name, allowed in (("lm_head_type", HEAD_TYPES), ("final_own_scale", OWN_SCALES)):
            value = getattr(self, name)
            if value not in allowed:
                _refuse(name, value, f"one of {', '.join(allowed)}{nearest(str(value), allowed)}")
        for f in fields(self):
            value = getattr(self, f.name)
            if f.type is bool and not isinstance(value, bool):
                _refuse(f.name, value, "true or false")
        for name in ("use_comm", "use_attention_comm", "use_mlp_comm"):
            if not isinstance(getattr(self, name), bool | None):
                _refuse(name, getattr(self, name), "true or false")
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            value = getattr(self, name)
            for token in value if isinstance(value, tuple) else (value,):
                if token is not None and (not _is_int(token) or not 0 <= token < self.vocab_size):
                    _refuse(name, value, f"a token id below vocab_size {self.vocab_size}")

    def _check_combinations(self) -> None:
        lanes = self.num_lanes
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            _refuse(
                "hidden_size",
                self.hidden_size,
                f"a multiple of num_attention_heads {self.num_attention_heads}, or set head_dim",
            )
        if not _is_int(self.head_size) or self.head_size < 2 or self.head_size % 2:
            _refuse("head_dim", self.head_size, "a positive even number (RoPE rotates pairs)")
        if self.num_attention_heads % self.num_key_value_heads:
            _refuse(
                "num_attention_heads",
                self.num_attention_heads,
                f"a multiple of num_key_value_heads {self.num_key_value_heads}",
            )
        if self.num_key_value_heads < lanes:
            _refuse(
                "num_key_value_heads",
                self.num_key_value_heads,
                f"at least num_lanes {lanes}, so that each lane owns whole heads",
            )
        for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
            if getattr(self, name) % lanes:
                _refuse(name, getattr(self, name), f"divisible by num_lanes {lanes}")
        if self.lm_head_type == "vocab_parallel" and self.vocab_size % lanes:
            _refuse(
                "vocab_size",
                self.vocab_size,
                f"divisible by num_lanes {lanes} with lm_head_type vocab_parallel",
            )
        if self.pre_norm_lane_agg and self.lm_head_type != "replicate":
            _refuse("lm_head_type", self.lm_head_type, "replicate with pre_norm_lane_agg")
        if self.tie_word_embeddings and self.lm_head_type != "replicate":
            _refuse(
                "tie_word_embeddings",
                True,
                f"false with lm_head_type {self.lm_head_type}: only the replicate head has the "
                "embedding's shape",
            )
        for name in ("use_comm", "use_attention_comm", "use_mlp_comm"):
            if self.ladder_residual and getattr(self, name) is False:
                _refuse(name, False, "true or absent with ladder_residual")
        for name in ("use_attention_comm", "use_mlp_comm"):
            if self.use_comm is False and getattr(self, name):
                _refuse(name, True, "false or absent when use_comm is false")
        self._check_windows()

    def _check_windows(self) -> None:
        layers = self.num_hidden_layers
        if self.sliding_window is not None and (
            not _is_int(self.sliding_window) or self.sliding_window < 1
        ):
            _refuse("sliding_window", self.sliding_window, "a positive integer or null")
        if not _is_int(self.sliding_window_n_layers) or abs(self.sliding_window_n_layers) > layers:
            _refuse(
                "sliding_window_n_layers",
                self.sliding_window_n_layers,
                f"an integer from {-layers} to {layers} (negative: the last layers)",
            )
        for name in ("swa_layers", "unclamped_layers"):
            listed = getattr(self, name)
            if not isinstance(listed, tuple | None):
                _refuse(name, listed, "a list of layer numbers, or null")
            for layer in listed or ():
                if not _is_int(layer) or not 0 <= layer < layers:
                    _refuse(name, layer, f"layer numbers from 0 to {layers - 1}")
        if self.swa_layers is not None and self.sliding_window_n_layers:
            _refuse(
                "swa_layers",
                list(self.swa_layers),
                f"absent when sliding_window_n_layers ({self.sliding_window_n_layers}) is given: "
                "one of the two",
            )
        if self.sliding_window is None:
            name = "sliding_window_n_layers" if self.sliding_window_n_layers else "swa_layers"
            if getattr(self, name):
                _refuse("sliding_window", None, f"a window size, since {name} is given")

    # Resolved rules -------------------------------------------------------------------------

    @property
    def head_size(self) -> int:
        """d, the size of one attention head."""
        if self.head_dim is not None:
            return self.head_dim
        return self.hidden_size // self.num_attention_heads

    def window(self, layer: int) -> int | None:
        """Sliding window of `layer` in keys, the query's own included; None: full attention."""
        if self.swa_layers is not None:
            slides = layer in self.swa_layers
        else:
            k, n = self.sliding_window_n_layers, self.num_hidden_layers
            slides = layer < k or (k < 0 and layer >= n + k)
            slides = slides and layer not in (self.unclamped_layers or ())
        return self.sliding_window if slides else None

    def communicates(self, module: str) -> bool:
        """Whether lanes hear each other's `module` ("attention" or "mlp") outputs after the early layers."""
        own = self.use_attention_comm if module == ATTENTION else self.use_mlp_comm
        if own is not None:
            return own
        return self.use_comm is not False

    def sums_now(self, layer: int) -> bool:
        """Whether `layer` adds all lanes' outputs at once (ordinary tensor parallelism)."""
        return self.use_early_comm and layer < self.broadcast_delay and not self.ladder_residual

    def queues(self, layer: int, module: str) -> bool:
        """Whether the partials of `module` in `layer` reach the other lanes δ layers later (with
        `ladder_residual`: one module later)."""
        if self.ladder_residual:
            return True
        arrives = layer + self.broadcast_delay < self.num_hidden_layers
        held_back = self.sums_now(layer) and not self.early_broadcast
        return self.communicates(module) and arrives and not held_back

    def lane_sums(self) -> int:
        """[B,S,D] vectors summed across lanes in one forward pass, the final lane mean included.

        Spec section 2. A head without a lane mean (lane, vocab_parallel) adds none.
        """
        modules = sum(
            self.sums_now(layer) or self.queues(layer, module)
            for layer in range(self.num_hidden_layers)
            for module in (ATTENTION, MLP)
        )
        return modules + (self.lm_head_type == "replicate")

    def num_parameters(self) -> int:
        """Exact parameter count; a tied head counts once."""
        d, n, lanes = self.hidden_size, self.num_hidden_layers, self.num_lanes
        q = self.num_attention_heads * self.head_size
        kv = self.num_key_value_heads * self.head_size
        norm = d if self.replicated_rmsn_scale else lanes * d
        final_norm = d if self.pre_norm_lane_agg else norm
        layer = d * (2 * q + 2 * kv) + 3 * d * self.intermediate_size + 2 * norm
        layer += 2 * self.head_size * self.qk_norm
        head = self.vocab_size * d * (lanes if self.lm_head_type == "lane" else 1)
        if self.tie_word_embeddings:
            head = 0
        return n * layer + final_norm + self.vocab_size * d + head

    # Files ----------------------------------------------------------------------------------

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Build from a parsed `config.json`; keys that are not ours are kept in `extra`.

        So are keys spelled out at a default that `to_dict` would leave out.
        """
        default = {f.name: f.default for f in fields(cls) if f.name != "extra"}
        ours = {k: v for k, v in values.items() if k in default}
        for name, value in ours.items():
            if value is None and name not in _NULLABLE:
                _refuse(name, None, "a value")
        if not ours:
            raise UserError(
                f"holds no field of a Laneformer, such as {', '.join(list(default)[:3])}"
            )
        if values.get("hidden_act", "silu") not in ("silu", "swish"):
            _refuse("hidden_act", values["hidden_act"], "silu")
        unwritten = {k for k in _WRITTEN_WHEN_SET & ours.keys() if ours[k] == default[k]}
        extra = {k: v for k, v in values.items() if k not in ours or k in unwritten}
        return cls(**ours, extra=extra)

    @classmethod
    def from_json(cls, path: str | Path) -> Self:
        """Read a `config.json`, or the one in a folder.

        Warns of keys that look misspelt. Raises UserError when it is absent or not a JSON object.
        """
        path = Path(path)
        if path.is_dir():
            path /= "config.json"
        values = read_json(path)
        if not isinstance(values, dict):
            raise UserError(f"{path}: must hold a JSON object, holds {type(values).__name__}")
        ours = [f.name for f in fields(cls) if f.name != "extra"]
        warn_of_misspellings(values, [*ours, *_SIMILAR], str(path))
        try:
            return cls.from_dict(values)
        except UserError as error:
            raise UserError(f"{path}: {error}") from None

    def to_dict(self) -> dict[str, Any]:
        """The `config.json` mapping: `extra`, then our fields; those the public code lacks only when set."""
        out = dict(self.extra)
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name == "extra" or (f.name in _WRITTEN_WHEN_SET and value == f.default):
                continue
            if isinstance(value, RopeScaling):
                value = dataclasses.asdict(value)
            out[f.name] = list(value) if isinstance(value, tuple) else value
        return out


# None is a value of these fields. The second set stays out of a config.json while at its default: fields
# of the other generation of the public code, and ours.
_NULLABLE = {f.name for f in fields(LaneformerConfig) if f.default is None}
_WRITTEN_WHEN_SET = (_NULLABLE - {"sliding_window"}) | {
    "sliding_window_n_layers",
    "qk_norm",
    "early_broadcast",
    "final_own_scale",
    "ladder_residual",
    "initializer_range",
}


# A key of other libraries that is no misspelling of ours.
_SIMILAR = ("use_sliding_window",)


def _rope_scaling(values: Mapping[str, Any]) -> RopeScaling:
    values = dict(values)
    if "type" in values:  # the name before rope_type
        values.setdefault("rope_type", values.pop("type"))
    names = [f.name for f in fields(RopeScaling)]
    for name in values:
        if name not in names:
            raise UserError(f"rope_scaling.{name}: unknown field{nearest(name, names)}")
    if "factor" not in values:
        raise UserError("rope_scaling.factor: missing; a number of at least 1")
    return RopeScaling(**values)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return _is_int(value) and 0 < value < 2**31


def _is_finite(value: Any) -> bool:
    """A number that float64 holds; an int beyond its range is not."""
    try:
        return not isinstance(value, bool) and math.isfinite(value)
    except (TypeError, OverflowError):
        return False


def _refuse(name: str, value: Any, allowed: str) -> None:
    shown = json.dumps(value, default=str)
    shown = shown if len(shown) <= 80 else f"{shown[:80]}…"
    raise UserError(f"{name}: {shown} is not possible; must be {allowed}")
