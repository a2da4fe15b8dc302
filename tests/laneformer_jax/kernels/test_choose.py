"""Which kernels run where, and what a user hears about it."""

from types import SimpleNamespace

import numpy as np
import pytest
from flax import nnx

from decode.engine import Engine
from decode.request import Request
from laneformer_jax import Laneformer
from laneformer_jax.errors import UserError
from laneformer_jax.kernels.choose import choose
from laneformer_jax.presets import preset

CONFIG = preset("laneformer-2b")


def device(platform, kind, capability=None):
    return SimpleNamespace(platform=platform, device_kind=kind, compute_capability=capability)


CPU = device("cpu", "cpu")
H200 = device("gpu", "NVIDIA H200", "9.0")
MI300X = device("gpu", "AMD Instinct MI300X", "gfx942:sramecc+:xnack-")
T4 = device("gpu", "Tesla T4", "7.5")
MI250 = device("gpu", "AMD Instinct MI250X", "gfx90a")


@pytest.mark.parametrize("name", ["auto", "fused"])
@pytest.mark.parametrize("gpu", [H200, MI300X])
def test_fused_where_it_can_run(name, gpu):
    assert choose(name, CONFIG, gpu) == "fused"


def test_auto_is_silent_where_nobody_expects_kernels(capsys):
    assert choose("auto", CONFIG, CPU) == "xla"
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("config", "gpu", "weights", "why"),
    [
        (CONFIG, T4, "native", "device gpu (Tesla T4)"),
        (CONFIG, MI250, "native", "device gpu (AMD Instinct MI250X)"),
        (CONFIG, H200, "int8", "weights int8"),
        (preset("tiny", qk_norm=True), H200, "native", "qk_norm"),
    ],
)
def test_a_gpu_that_falls_back_says_why_in_one_line(config, gpu, weights, why, capsys):
    assert choose("auto", config, gpu, weights) == "xla"
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert why in err
    with pytest.raises(UserError) as error:
        choose("fused", config, gpu, weights)
    assert why in str(error.value)


def test_names():
    with pytest.raises(UserError, match="did you mean 'fused'"):
        choose("fusd", CONFIG, H200)
    with pytest.raises(UserError, match="compute capability"):
        choose("fused", CONFIG, CPU)
    assert choose("interpret", CONFIG, CPU) == "interpret"
    assert choose("xla", preset("tiny", qk_norm=True), CPU) == "xla"


@pytest.mark.slow
def test_the_engine_gives_the_same_tokens():
    config = preset(
        "tiny",
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        broadcast_delay=1,
        max_position_embeddings=64,
        sliding_window=6,
        swa_layers=(0,),
        initializer_range=0.5,
    )
    model = Laneformer(config, rngs=nnx.Rngs(3))
    request = Request(list(range(5, 25)), 12)
    answers = [
        np.concatenate([burst.tokens[0] for burst in Engine(model, kernels=k).stream(request)])
        for k in ("xla", "interpret")
    ]
    assert answers[0].tolist() == answers[1].tolist()
