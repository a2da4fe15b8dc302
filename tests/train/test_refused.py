"""What a run refuses: exit code 2, one line with field, value and what would be right, and nothing left
behind."""

import shutil
from pathlib import Path

import pytest

from laneformer_jax import cli
from laneformer_jax.tokenizer import train_tokenizer

SHORT = ("train.steps=2", "schedule.warmup_steps=1", "schedule.decay_steps=1", "eval.interval=null")


def refused(capsys, corpus: Path, out: Path | str, *arguments: str) -> str:
    """The one line that a refused command says."""
    before = sorted(Path(out).rglob("*")) if out else None
    command = ["train", "--config", str(corpus / "run.yaml"), "--out", str(out), *SHORT, *arguments]
    assert cli.main(command) == 2
    said = capsys.readouterr().err.splitlines()
    (error,) = [line for line in said if not line.startswith("warning: ")]
    assert error.startswith("error: ")
    if out:
        assert sorted(Path(out).rglob("*")) == before
        assert before or not Path(out).is_dir()
    return error.removeprefix("error: ")


@pytest.mark.parametrize(
    ("override", "told"),
    [
        # of the wrong type
        ("train.steps=many", "train.steps = 'many': must be a valid integer"),
        ("train.steps=1.5", "train.steps = 1.5: must be a valid integer"),
        ("train.steps=true", "'train.steps=true': train.steps = True: must be a number"),
        ("train.steps=1e30", "train.steps = 1e+30: is too large"),
        ("optimizer.clip_norm=false", "optimizer.clip_norm = False: must be a number"),
        ("mesh=8", "mesh = 8: must be a mapping"),
        ("eval.sources=a", "eval.sources = 'a': must be a list"),
        # unknown
        ("train.step=3", "train.step: unknown field (did you mean 'steps'?)"),
        ("optimizer.name=adam", "must be 'adamw' or 'muon' (did you mean 'adamw'?)"),
        ("eval.sources=[c]", "eval.sources: 'c' is not in the mixture; its sources: a, b"),
        # out of range
        ("train.steps=2147483648", "train.steps = 2147483648: must be at most 2147483647"),
        ("optimizer.stop_after_skips=0", "optimizer.stop_after_skips = 0: must be at least 1"),
        ("checkpoint.keep=-1", "checkpoint.keep = -1: must be at least 1"),
        ("optimizer.learning_rate=.nan", "optimizer.learning_rate = nan: must be a positive"),
        ("optimizer.weight_decay=.inf", "weight_decay = inf: must be a finite number, at least 0"),
        ("data.sources.b.weight=.nan", "data.sources.b.weight = nan: must be a positive number"),
        # that do not fit together
        ("schedule.warmup_steps=9", "warm-up and decay_steps = 10 exceed train.steps 2"),
        ("mesh.data=3", "train.batch_size = 4: cut into 1 microbatches it must be divisible by"),
        ("mesh.fsdp=16", "run.yaml: train.batch_size = 4: cut into 1"),  # no override set that
        ("train.seq_len=33", "train.seq_len = 33: exceeds the model's max_position_embeddings 32"),
        ("data.num_shards=3", "batch_size = 4: must be a multiple of the number of shards, 3"),
        ("model.overrides.vocab_size=100", "has 280 tokens, more than the model's vocab_size 100"),
        ("mesh={data: 4, fsdp: 1, lane: 64}", "needs 256 devices; "),
        # that is not there
        ("data.sources={}", "data.sources: no source is given"),
        ("data.sources.a.path=missing/*.txt", "source 'a': missing/*.txt: no such file"),
        ("tokenizer=missing.model", "tokenizer: missing.model is no file"),
        ("tokenizer=.", "tokenizer: . is no file, nor a folder with tokenizer.model"),
    ],
)
def test_settings(override, told, corpus, tmp_path, capsys):
    overrides = ["eval.interval=1"] if override.startswith("eval") else []
    assert told in refused(capsys, corpus, tmp_path / "run", *overrides, override)


def test_evaluation_of_sources_that_hold_nothing_out(corpus, tmp_path, capsys):
    told = refused(capsys, corpus, tmp_path / "run", "eval.interval=1", "eval.sources=[b]")
    assert "eval.sources = ['b']: none of them holds documents out; a of the mixture does" in told


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--resume", "must"], "--resume must, but there is no checkpoint to resume from"),
        (["--resume", "yes"], "choose from 'auto', 'never', 'must'"),
        (["--outt", "x"], "unknown option --outt (did you mean '--out'?)"),
        (["--num-processes", "2"], "--num-processes: needs --coordinator and --process-id"),
        (["--dry-run", "--devices", "0"], "--devices 0: must be at least 1"),
        (["--dry-run", "--hardware", "h2000"], "'h2000' is unknown; one of h200, mi300x, h100"),
    ],
)
def test_options(arguments, told, corpus, tmp_path, capsys):
    assert told in refused(capsys, corpus, tmp_path / "run", *arguments)


def test_folders(corpus, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    told = refused(capsys, corpus, tmp_path / "file")
    assert told == f"--out: {tmp_path / 'file'} is a file; the run needs a folder"
    assert str(tmp_path / "file" / "run") in refused(capsys, corpus, tmp_path / "file" / "run")
    assert "/proc" in refused(capsys, corpus, "/proc/no/run")
    # As of a shell variable that is not set: it is not the current folder.
    assert "argument --out: must name a file or folder, is empty" in refused(capsys, corpus, "")


@pytest.fixture(scope="module")
def run(corpus, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("refused") / "run"
    command = ["train", "--config", str(corpus / "run.yaml"), "--out", str(out), *SHORT]
    assert cli.main([*command, "optimizer.ema=0.5"]) == 0
    return out


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("optimizer.name=muon", "that of name adamw; go on with optimizer.name=adamw, or begin"),
        ("optimizer.ema=null", "that of ema 0.5; go on with optimizer.ema=0.5, or begin a run"),
        ("model.overrides.num_hidden_layers=3", "another model (num_hidden_layers: 2 then, 3 now)"),
        ("model.overrides.vocab_size=336", "another model (vocab_size: 320 then, 336 now)"),
        ("tokenizer=OTHER", "is not the one that the model in"),
        ("data.sources.b.weight=2", "(--restart-data)"),
        ("data.packing=best_fit", "(--restart-data)"),
        ("data.num_shards=2", "cannot continue; run with a number of processes"),
    ],
)
@pytest.mark.filterwarnings("ignore:resuming with other settings")
def test_going_on_with_something_else(override, told, run, corpus, tmp_path, capsys):
    if override == "tokenizer=OTHER":
        train_tokenizer(["other words alpha beta gamma " * 9] * 9, 280, tmp_path / "other.model")
        override = f"tokenizer={tmp_path / 'other.model'}"
    out = Path(shutil.copytree(run, tmp_path / "run"))
    assert told in refused(capsys, corpus, out, "optimizer.ema=0.5", "train.steps=4", override)


def test_a_running_mean_may_fall_faster(run, corpus, tmp_path):
    out = Path(shutil.copytree(run, tmp_path / "run"))
    command = ["train", "--config", str(corpus / "run.yaml"), "--out", str(out), *SHORT]
    with pytest.warns(UserWarning, match=r"optimizer.ema: 0.5 then, 0.25 now"):
        assert cli.main([*command, "optimizer.ema=0.25", "train.steps=3"]) == 0
