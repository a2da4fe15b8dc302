"""`laneformer tune`: what it says without a GPU, and the whole of it in the interpreter at a tiny size."""

import pytest

from laneformer_jax import cli, settings
from laneformer_jax.errors import UserError
from laneformer_jax.kernels import cases, tune
from laneformer_jax.kernels.backend import Backend
from laneformer_jax.kernels.tuning import INTERPRETER, SHIPPED, Keys, Launch, Rows, Tuning, shipped
from laneformer_jax.presets import preset

CONFIG = preset(
    "tiny",
    num_lanes=2,
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=1,
    broadcast_delay=1,
    max_position_embeddings=64,
    swa_layers=(),
    sliding_window=None,
)


def test_without_a_gpu_it_is_one_line(capsys):
    assert cli.main(["tune"]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "needs a GPU" in err
    assert "cpu" in err


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_tables(name, tmp_path):
    """What is written is read back; candidates start with what is there and fit a thread's registers."""
    table = shipped(name)
    tune.write(table, tmp_path / "new" / "table.yaml", "as shipped")
    assert settings.load(Tuning, tmp_path / "new" / "table.yaml") == table
    at = tune.Setup(CONFIG, Backend(), 2, 16)
    rows, keys = (list(tune._candidates(at, base)) for base in (table.qkv, table.attention))
    assert rows[0] == table.qkv
    assert keys[0] == table.attention
    assert all(1 <= r.rows * r.columns / (32 * r.launch.warps) <= 64 for r in rows[1:])
    assert len(set(rows)) >= 40
    assert len(set(keys)) >= 100


def test_a_kernel_that_is_wrong_is_not_timed():
    sizes = cases.Sizes(CONFIG, 2, 16)
    prepared = cases.Prepared("norm_gate_up", sizes, working_set=0)
    prepared.exact = prepared.exact * 1.02
    with pytest.raises(UserError, match=r"norm_gate_up.*off by"):
        prepared.measure(Backend(interpret=True), INTERPRETER, 1)


def test_blocks_that_do_not_compile_are_left_out_and_a_wrong_result_is_not():
    def failing(error):
        def measure():
            raise error

        return measure

    assert tune._time(lambda: 1.5) == 1.5
    assert tune._time(failing(NotImplementedError("too large"))) is None
    with pytest.raises(UserError, match="off by"):
        tune._time(failing(UserError("head: the kernel is off by 2 %")))


class Broken(Backend):
    """Whose launches from the one called `first` on do not compile."""

    first = "norm_qkv"

    def launch(self, kernel, name, *rest, **more):
        if name == self.first:
            raise NotImplementedError("too large")
        return super().launch(kernel, name, *rest, **more)


class WithoutFinalNorm(Broken):
    first = "final_norm"


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        (Broken, r"norm_qkv: no blocks compile"),
        pytest.param(WithoutFinalNorm, "whole tokens", marks=pytest.mark.slow),
    ],
)
def test_a_device_on_which_nothing_compiles_is_one_line(backend, message):
    few = dict(stages=(1,), rows=(), columns=(), warps=(), splits=(), repeats=1, working_set=0)
    at = tune.Setup(CONFIG, backend(interpret=True), 2, 20, tokens=1, **few)
    with pytest.raises(UserError, match=message):
        tune.tune(at, INTERPRETER)


@pytest.mark.slow
def test_everything_at_a_tiny_size(capsys, tmp_path):
    at = tune.Setup(
        CONFIG,
        Backend(interpret=True),
        lanes=2,
        context=20,
        stages=(1,),
        rows=(8,),
        columns=(32,),
        warps=(2,),
        splits=(1,),
        keys=(16,),
        repeats=1,
        tokens=1,
        working_set=0,
    )
    table = tune.tune(at, INTERPRETER)
    tune.write(table, tmp_path / "table.yaml", "a test")
    assert settings.load(Tuning, tmp_path / "table.yaml") == table
    for field in ("qkv", "out", "gate_up", "down", "head"):
        assert getattr(table, field) in (getattr(INTERPRETER, field), Rows(8, 32, Launch(2)))
    assert table.attention in (INTERPRETER.attention, Keys(1, 16, Launch(2)))
    assert table.layer.count == 1
    said = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in said] == [*cases.CASES, "fused", "layer", "token"]
    assert all("of 2:" in line for line in said[: len(cases.CASES)])
