"""Runs as a whole: what they start from, what they log, and what may change when they resume."""

import dataclasses
import gzip
import json
import shutil
import warnings
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from laneformer_jax import cli, costs, settings
from laneformer_jax.checkpoint import native
from laneformer_jax.checkpoint.training import TrainingCheckpoints
from laneformer_jax.checkpoint.workplace import claim
from laneformer_jax.errors import UserError
from laneformer_jax.model import Laneformer, parameter_paths
from laneformer_jax.tokenizer import train_tokenizer
from train import RunConfig, loop
from train.loop import train
from train.metrics import read_jsonl
from train.optimizer import make_optimizer, schedule
from train.processes import Processes
from train.setup import Setup, prepare
from train.step import Plan, init_params, state_shardings

SMALL = dict(
    vocab_size=320,
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=2,
    sliding_window=8,
    swa_layers=[0],
    max_position_embeddings=32,
)


def config_of(corpus: Path, *overrides: str) -> RunConfig:
    config = {
        "model": {"preset": "tiny", "overrides": SMALL},
        "tokenizer": str(corpus / "tokenizer.model"),
        "data": {
            "sources": {
                "a": {"kind": "text", "path": str(corpus / "texts"), "heldout": 0.2},
                "b": {"kind": "jsonl", "path": str(corpus / "rows.jsonl")},
            }
        },
        "train": {"steps": 5, "batch_size": 4, "seq_len": 16},
        "schedule": {"warmup_steps": 2, "decay_steps": 2, "final": 0.1},
        "optimizer": {"learning_rate": 0.01},
        "checkpoint": {"interval": 2},
        "log": {"interval": 2},
        "eval": {"interval": 4, "batches": 1},
    }
    return settings.replace(settings.from_dict(RunConfig, config), overrides)


def ready(config: RunConfig, out: Path, restart_data: bool = False) -> Setup:
    """A run before its first step; nothing of it is compiled."""
    checkpoints = TrainingCheckpoints(out / native.CHECKPOINTS)
    setup = prepare(config, checkpoints, restart_data, Processes())
    setup.batches.close()
    return setup


@pytest.fixture(scope="module")
def finished(corpus, tmp_path_factory) -> Path:
    """A run of five steps; do not write into it."""
    out = tmp_path_factory.mktemp("finished") / "run"
    result = train(config_of(corpus), out)
    assert (result.step, result.exit_code, result.out) == (5, 0, out)
    records = read_jsonl(out / "metrics.jsonl")
    assert result.loss == [r["loss"] for r in records if "loss" in r][-1]
    assert result.eval_loss == [r["eval_loss"] for r in records if "eval_loss" in r][-1]
    return out


@pytest.fixture
def run(finished, tmp_path) -> Path:
    """A copy of `finished`, to be resumed."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


def state_of(out: Path, step: int, config: RunConfig):
    """Parameters, moments, counts and key of a checkpoint."""
    assert config.model is not None
    plan = Plan(config.model.build())
    shapes = plan.abstract_params()
    rate = schedule(config.schedule, config.optimizer.learning_rate, config.train.steps)
    optimizer = make_optimizer(config.optimizer, rate, shapes)
    where = state_shardings(plan, optimizer, shapes)
    rng = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0)))
    tree = {"opt_state": jax.eval_shape(optimizer.init, shapes), "rng": rng}
    tree = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        tree,
        {"opt_state": where.opt_state, "rng": where.rng},
    )
    checkpoints = TrainingCheckpoints(out / native.CHECKPOINTS)
    restored = checkpoints.restore(out / native.CHECKPOINTS / str(step), shapes, tree)
    return jax.device_get((restored.params, restored.optimizer))


def test_one_update_after_a_resume_leaves_the_whole_state_of_an_undisturbed_run(run, corpus):
    """Every count, moment and parameter, decay and schedule included, bit for bit."""
    config = config_of(corpus)
    before, want = state_of(run, 4, config), state_of(run, 5, config)
    shutil.rmtree(run / native.CHECKPOINTS / "5")
    assert train(config, run).exit_code == 0
    got = state_of(run, 5, config)
    assert int(got[1]["opt_state"].made) == int(before[1]["opt_state"].made) + 1 == 5
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b)


# What a run leaves behind


def test_the_interval_and_the_last_step_are_logged(finished, corpus):
    records = read_jsonl(finished / "metrics.jsonl")
    updates = [r for r in records if "loss" in r]
    assert [r["step"] for r in updates] == [2, 4, 5]
    assert [r["step"] for r in records if "eval_loss" in r] == [4, 5]
    # Peak 0.01 from update 2 on; the last two updates fall to a tenth.
    np.testing.assert_allclose([r["lr"] for r in updates], [0.01, 0.0055, 0.001], rtol=1e-6)
    # wandb keeps names that begin so for itself, and leaves such metrics out of its charts.
    assert not [name for r in records for name in r if name.startswith("_")]
    for r in updates:
        assert r["tokens"] == r["step"] * 4 * 16
        assert r["perplexity"] == pytest.approx(np.exp(r["loss"]))
        assert r["loss_weight"] == 64
        assert r["grad_norm"] > 0
        assert r["tokens_per_s"] == pytest.approx(4 * 16 / r["step_s"])
        flops = costs.training_flops(config_of(corpus).model.build(), 16)
        assert r["model_flops_per_s"] == pytest.approx(flops * r["tokens_per_s"])
        assert "mfu" not in r  # no vendor's peak for a CPU
        assert 0 <= r["data_wait"] <= 1
        assert 0 < r["useful_s"] <= r["wall_s"]
        assert r["goodput"] == pytest.approx(r["useful_s"] / r["wall_s"])
        assert r["host_memory_peak_bytes"] > 2**24
        for layer in ("layer_000", "layer_001"):
            assert r[f"grad_norm/{layer}"] > 0
            assert 0 < r[f"lane_drift/{layer}"] < 7 / 8
        parts = [v for k, v in r.items() if k.startswith("grad_norm/")]
        assert np.linalg.norm(parts) == pytest.approx(r["grad_norm"], rel=1e-5)
    assert [r["useful_s"] for r in updates] == sorted(r["useful_s"] for r in updates)
    assert ["compile_s" in r for r in updates] == [True, False, False]
    # Compiling is no part of any step's time: less than it took, by far.
    assert updates[0]["step_s"] < updates[0]["compile_s"]


def test_profile_writes_a_trace_of_three_updates(corpus, tmp_path):
    train(config_of(corpus, "eval.interval=null"), tmp_path / "run", profile=True)
    (folder,) = (tmp_path / "run" / loop.PROFILE / "plugins" / "profile").iterdir()
    (trace,) = folder.glob("*.trace.json.gz")
    assert len(list(folder.glob("*.xplane.pb"))) == 1
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    steps = [e["args"]["step_num"] for e in events if e.get("name") == "train"]
    assert sorted(map(int, steps)) == [3, 4, 5]


def test_the_config_of_a_run_reads_back(finished, corpus):
    assert settings.load(RunConfig, finished / loop.CONFIG) == config_of(corpus)


def test_when_the_data_ends_the_last_step_is_logged_and_saved(corpus, tmp_path):
    config = config_of(
        corpus,
        "data.sources.a.epochs=1",
        "data.sources.b.epochs=1",
        "train.batch_size=64",
        "train.steps=1000",
        "log.interval=1000",
        "checkpoint.interval=1000",
        "eval.interval=null",
    )
    with pytest.warns(UserWarning, match=r"the data ended after \d+ of 1000 steps"):
        result = train(config, tmp_path / "run")
    assert 0 < result.step < 1000
    records = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [(r["step"], r["loss"]) for r in records] == [(result.step, result.loss)]
    assert native.find(tmp_path / "run").name == str(result.step)


# Starting from another run's parameters


def assert_fresh_start(setup: Setup, params: dict, alone: Setup) -> None:
    """The parameters, and nothing else: the rest is that of a run which starts by itself."""
    assert not setup.restored
    assert setup.state.params.keys() == params.keys()
    for path, value in setup.state.params.items():
        assert value.dtype == np.float32
        np.testing.assert_array_equal(np.asarray(value), np.asarray(params[path]), err_msg=path)
    rest, expected = (
        jax.device_get((s.state.opt_state, s.state.step, s.state.rng)) for s in (setup, alone)
    )
    assert jax.tree.structure(rest) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(rest), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)
    assert setup.state.step == 0
    assert setup.batches.get_state() == alone.batches.get_state()


@pytest.mark.parametrize("kind", ["run", "native", "hf"])
def test_a_phase_starts_from_parameters_only(kind, finished, corpus, tmp_path):
    source = tmp_path / "source"
    model = native.load_model(finished)
    if kind == "run":
        source = finished
    elif kind == "native":
        native.save_inference(source, model, tokenizer=corpus / "tokenizer.model")
    else:
        model.save_pretrained(source)
        shutil.copy(corpus / "tokenizer.model", source)
    params = native.read_params(
        native.find(finished), native.abstract_params(model.config, np.float32)
    )
    config = config_of(corpus, "model=null", "tokenizer=null", f"init_from={source}")
    setup = ready(config, tmp_path / "next")
    assert dataclasses.replace(setup.plan.config, extra={}) == model.config  # HF's own fields
    assert_fresh_start(setup, params, ready(config_of(corpus), tmp_path / "alone"))


def test_another_tokenizer_than_the_models_is_refused(finished, corpus, tmp_path):
    """Of the same size, so that no id is out of range."""
    train_tokenizer(["other words alpha beta gamma " * 9] * 9, 280, tmp_path / "tokenizer.model")
    override = f"init_from={finished}", "model=null"
    config = config_of(corpus, f"tokenizer={tmp_path / 'tokenizer.model'}", *override)
    with pytest.raises(UserError, match=r"is not the one that the model in .* learnt with"):
        ready(config, tmp_path / "next")
    ready(config_of(corpus, *override), tmp_path / "next")  # the same, by its path


def test_a_folder_without_a_model_is_refused(corpus, tmp_path):
    (tmp_path / "empty").mkdir()
    config = config_of(corpus, "model=null", f"init_from={tmp_path / 'empty'}")
    with pytest.raises(UserError, match=r"init_from: .*empty: holds no model"):
        train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_resumes_without_the_one_it_came_from(finished, corpus, tmp_path):
    source = Path(shutil.copytree(finished, tmp_path / "source"))
    config = config_of(
        corpus, "model=null", "tokenizer=null", f"init_from={source}", "eval.interval=null"
    )
    train(config, tmp_path / "next")
    shutil.rmtree(source)
    setup = ready(config, tmp_path / "next")
    assert setup.restored
    assert setup.state.step == 5
    assert isinstance(native.load_model(tmp_path / "next"), Laneformer)


# Resuming with something changed


def test_an_unchanged_run_resumes_without_a_word(run, corpus):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        setup = ready(config_of(corpus), run)
    assert setup.restored
    assert setup.state.step == 5
    counted = (optax.ScaleByAdamState, optax.ScaleByScheduleState)
    counts = [int(s.count) for s in setup.state.opt_state.inner if isinstance(s, counted)]
    assert counts == [5, 5]
    saved = native.read_metadata(native.find(run))["data_state"]
    assert json.loads(json.dumps(setup.batches.get_state())) == saved


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.overrides.num_hidden_layers=3", "num_hidden_layers: 2 then, 3 now"),
        ("model.overrides.hidden_size=32", "hidden_size: 16 then, 32 now"),
        ("model.overrides.broadcast_delay=1", "broadcast_delay: 2 then, 1 now"),
    ],
)
def test_another_model_is_refused(override, message, run, corpus):
    with pytest.raises(UserError, match=f"belongs to another model .*{message}"):
        ready(config_of(corpus, override), run)


@pytest.mark.parametrize(
    ("override", "what"),
    [
        ("data.sources.b.weight=2", "sources.b"),
        ("data.sources.a.heldout=0.3", "sources.a"),
        ("train.seed=1", "seed: 0 then, 1 now"),
        ("train.seq_len=8", "seq_len: 16 then, 8 now"),
    ],
)
def test_another_mixture_needs_restart_data(override, what, run, corpus):
    config = config_of(corpus, override)
    with (
        pytest.warns(UserWarning, match="resuming with other settings"),
        pytest.raises(UserError, match=rf"belongs to other data \(.*{what}.*--restart-data"),
    ):
        ready(config, run)
    with pytest.warns(UserWarning, match="resuming with other settings"):
        setup = ready(config, run, restart_data=True)
    assert setup.state.step == 5
    fresh = ready(config, run.parent / "fresh")
    assert setup.batches.get_state() == fresh.batches.get_state()


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("optimizer.learning_rate=0.02", "optimizer.learning_rate: 0.01 then, 0.02 now"),
        ("optimizer.clip_norm=null", "optimizer.clip_norm: 1.0 then, None now"),
        ("train.steps=7", "train.steps: 5 then, 7 now"),
        ("train.compute_dtype=bfloat16", "train.compute_dtype: float32 then, bfloat16 now"),
        ("mesh.lane=2", "mesh.lane: 1 then, 2 now"),
    ],
)
def test_other_settings_are_told_and_taken(override, told, run, corpus):
    with pytest.warns(UserWarning, match="^resuming with other settings: ") as caught:
        setup = ready(config_of(corpus, override), run)
    (warned,) = [str(w.message) for w in caught if w.category is UserWarning]
    assert warned == f"resuming with other settings: {told}"
    assert setup.state.step == 5
    saved = native.load_model(run).tok_embeddings.weight[...]
    now = setup.state.params["tok_embeddings.weight"]
    np.testing.assert_array_equal(np.asarray(now), np.asarray(saved))


def test_another_machine_is_told(run, corpus, monkeypatch):
    here = native.environment()
    there = {**here, "device_count": 3, "cpu_affinity": [7]}
    monkeypatch.setattr(native, "environment", lambda: there)
    with pytest.warns(UserWarning, match="not bit for bit") as caught:
        ready(config_of(corpus), run)
    assert [str(w.message) for w in caught] == [
        f"resuming, but not bit for bit, since this differs: device_count: {here['device_count']}"
        f" then, 3 now; cpu_affinity: {here['cpu_affinity']} then, [7] now"
    ]


def test_resume_must_and_never(run, corpus, tmp_path):
    with pytest.raises(UserError, match="no checkpoint to resume from"):
        train(config_of(corpus), tmp_path / "new", resume="must")
    assert not (tmp_path / "new").exists()
    with pytest.raises(UserError, match="holds checkpoints up to step 5"):
        train(config_of(corpus), run, resume="never")


def test_metadata_says_what_made_it(run, corpus):
    metadata = native.read_metadata(native.find(run))
    assert metadata["kind"] == "training"
    assert metadata["phase"] == "pretrain"
    assert metadata["step"] == 5
    assert metadata["run"] == json.loads(json.dumps(settings.to_dict(config_of(corpus))))


def test_two_processes_do_not_train_in_one_folder(corpus, tmp_path):
    tmp_path.joinpath("run").mkdir()
    with (
        claim(tmp_path / "run"),
        pytest.raises(UserError, match="another process is training in this folder"),
    ):
        train(config_of(corpus), tmp_path / "run")
    assert list(tmp_path.joinpath("run").iterdir()) == []


def test_updates_that_cannot_be_made_end_the_run_with_the_batch(corpus, tmp_path):
    """A learning rate that throws the parameters out of float32's range: no gradient is finite again."""
    config = config_of(corpus, "optimizer.learning_rate=1e38", "optimizer.stop_after_skips=2")
    config = settings.replace(config, ["schedule.warmup_steps=0", "eval.interval=null"])
    with pytest.raises(UserError, match=r"2 updates in a row were skipped"):
        train(config, tmp_path / "run")
    (file,) = (tmp_path / "run").glob("skipped-*.npz")
    step = int(file.stem.split("-")[1])
    with np.load(file) as batch:
        assert batch["tokens"].shape == (4, 16)
        assert batch["loss_mask"].dtype == np.float32
    records = [r for r in read_jsonl(tmp_path / "run" / "metrics.jsonl") if "loss" in r]
    assert records[-1]["step"] == step
    assert records[-1]["skipped"] == 2
    assert records[0].keys() >= {
        "grad_norm/layer_001",
        "grad_norm/embedding",
        "lane_drift/layer_001",
    }


def test_the_mean_of_the_parameters_is_evaluated_too(corpus, tmp_path):
    """With all weight on the newest it is the parameters themselves."""
    train(config_of(corpus, "optimizer.ema=0.0", "train.steps=4"), tmp_path / "run")
    (record,) = (r for r in read_jsonl(tmp_path / "run" / "metrics.jsonl") if "eval_loss" in r)
    assert record["eval_loss_ema"] == pytest.approx(record["eval_loss"], rel=1e-6)


def test_the_mean_of_the_parameters_is_exported(finished, corpus, tmp_path, capsys):
    """Of a decay that keeps every term apart: the mean of the start and of what two updates made."""
    out, ema = tmp_path / "run", 0.75
    short = ("train.steps=2", "schedule.decay_steps=0", "eval.interval=null")
    config = config_of(corpus, f"optimizer.ema={ema}", "checkpoint.interval=1", *short)
    train(config, out)
    start = init_params(Plan(config.model.build()), config.train.seed)
    made = [native.load_model(out / "checkpoints" / step) for step in ("1", "2")]
    assert cli.main(["info", str(out)]) == 0
    assert "  ema: 0.75\n" in capsys.readouterr().out
    assert cli.main(["export", str(out), str(tmp_path / "mean"), "--ema", "--verify"]) == 0
    assert "tensors equal bit for bit" in capsys.readouterr().out
    exported = params_of(Laneformer.from_pretrained(tmp_path / "mean"))
    first, second = map(params_of, made)
    for path, value in exported.items():
        size = len(value)  # the vocabulary is cut to the tokenizer's
        mean = ema * start[path][:size] + (1 - ema) * first[path][:size]
        want = ema * mean + (1 - ema) * second[path][:size]
        np.testing.assert_allclose(value, want, rtol=1e-5, atol=1e-8, err_msg=path)
    assert cli.main(["export", str(finished), str(tmp_path / "none"), "--ema"]) == 2
    assert "holds no running mean of the parameters (optimizer.ema)" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def params_of(model: Laneformer) -> dict[str, jax.Array]:
    return {p: v[...] for p, v in parameter_paths(nnx.state(model)).items()}
