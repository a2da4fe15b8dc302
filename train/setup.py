"""What a run is made of before its first step: model, optimizer, data, and the state to go on from."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from data import build_dataset, build_eval_dataset, closing
from laneformer_jax import settings
from laneformer_jax.chat import ChatTemplate
from laneformer_jax.checkpoint import hf, native
from laneformer_jax.checkpoint.assets import CHAT_TEMPLATE, load_tokenizer
from laneformer_jax.checkpoint.training import Restored, TrainingCheckpoints
from laneformer_jax.config import LaneformerConfig
from laneformer_jax.errors import UserError
from laneformer_jax.remat import check_remat
from laneformer_jax.sharding import check_mesh, make_mesh
from laneformer_jax.tokenizer import Tokenizer
from train.batches import BatchIterator
from train.config import OptimizerConfig, RunConfig
from train.metrics import check_sinks
from train.optimizer import make_optimizer, schedule
from train.processes import Processes, row_share
from train.step import (
    Batch,
    Params,
    Plan,
    State,
    TrainState,
    init_params,
    init_state,
    make_eval_step,
    make_train_step,
    state_shardings,
)


@dataclass(frozen=True)
class Setup:
    """A run, ready to step."""

    plan: Plan
    state: State
    restored: bool
    train_step: Any  # jitted (State, Batch) -> (State, Metrics)
    eval_step: Callable[[Params, Batch], tuple[jax.Array, jax.Array]]
    batches: BatchIterator
    eval_batches: Callable[[], AbstractContextManager[Any]] | None
    tokenizer_path: Path
    chat_template: str | None  # None: Laneformer's own


def prepare(
    config: RunConfig,
    checkpoints: TrainingCheckpoints,
    restart_data: bool,
    processes: Processes,
) -> Setup:
    """Build everything and restore the newest complete checkpoint, if there is one.

    Raises:
        UserError: something that the config names cannot be had, or the checkpoint belongs to
            another model or other data.
    """
    resumed = _newest(checkpoints, processes)
    with processes.agreed():  # one host may lack what the others have
        found = _open(config, resumed)
    plan, seed = found.plan, config.train.seed
    tokens = config.train.batch_size * config.train.seq_len
    peak, steps = config.optimizer.learning_rate, config.train.steps
    rate = schedule(config.schedule, peak, steps, tokens)
    shapes = plan.abstract_params()
    optimizer = make_optimizer(config.optimizer, rate, shapes)
    shardings = state_shardings(plan, optimizer, shapes)
    if found.resumed is None:
        start = found.start
        if start is None:
            assert config.model is not None  # RunConfig requires one of the two
            params = init_params(plan, seed, config.model.residual_init_scale)
        else:
            params = _load(start, shapes, plan.mesh)
        state = init_state(plan, optimizer, params, seed)
    else:
        abstract = _abstract(shardings, optimizer, shapes)
        restored = checkpoints.restore(found.resumed, shapes, abstract)
        if processes.first:
            _tell_changes(config, restored)
        step = jax.device_put(jnp.asarray(restored.step, jnp.int32), shardings.step)
        rest = restored.optimizer
        state = TrainState(restored.params, rest["opt_state"], step, rest["rng"])
        if not restart_data:
            _continue_data(found.batches, restored)
    return Setup(
        plan,
        state,
        found.resumed is not None,
        make_train_step(plan, optimizer, rate, shardings),
        make_eval_step(plan),
        found.batches,
        found.eval_batches,
        found.tokenizer_path,
        found.chat_template,
    )


@dataclass(frozen=True)
class _Found:
    """What a host has to have for a run, before any device is asked."""

    resumed: Path | None
    start: _Start | None
    plan: Plan
    tokenizer_path: Path
    chat_template: str | None
    batches: BatchIterator
    eval_batches: Callable[[], AbstractContextManager[Any]] | None


def _newest(checkpoints: TrainingCheckpoints, processes: Processes) -> Path | None:
    """The checkpoint to resume from; the first process checks its files for all."""
    newest: Path | None = None
    with processes.agreed():
        if processes.first:
            newest = checkpoints.newest()
    name = processes.of_first(newest and newest.name)
    return None if name is None else checkpoints.folder / name


def _open(config: RunConfig, resumed: Path | None) -> _Found:
    check_sinks(config.log)
    sizes = config.train
    start = find_start(config, resumed)
    model = _model_config(config, start)
    if resumed is not None:
        _check_model(resumed, model)
        _check_optimizer(resumed, config.optimizer)
    if sizes.seq_len > model.max_position_embeddings:
        raise UserError(
            f"train.seq_len = {sizes.seq_len}: exceeds the model's max_position_embeddings"
            f" {model.max_position_embeddings}"
        )
    tokenizer_path = _tokenizer_path(config, start)
    tokenizer = Tokenizer.load(tokenizer_path)
    if tokenizer.vocab_size > model.vocab_size:
        raise UserError(
            f"tokenizer: {tokenizer_path} has {tokenizer.vocab_size} tokens, more than the model's"
            f" vocab_size {model.vocab_size}"
        )
    if start is not None and config.tokenizer is not None:
        _check_tokenizer(tokenizer, tokenizer_path, start.folder)
    mesh = None
    sides = config.mesh
    if sides.data * sides.fsdp * sides.lane > 1 or jax.process_count() > 1:
        mesh = make_mesh(sides.data, sides.lane, fsdp=sides.fsdp)
        check_mesh(mesh, model)
    check_remat(sizes.remat)
    plan = Plan(
        model, mesh, sizes.compute_dtype, sizes.remat, sizes.accumulate, config.optimizer.z_loss
    )
    share = row_share(mesh)
    return _Found(
        resumed,
        start,
        plan,
        tokenizer_path,
        _chat_template(config, start),
        iter(_dataset(config, tokenizer, share)),
        _eval_batches(config, tokenizer, share),
    )


@dataclass(frozen=True)
class _Start:
    """The folder whose model a run starts from, or the checkpoint it resumes from."""

    folder: Path
    native: bool
    config: LaneformerConfig


def find_start(config: RunConfig, resumed: Path | None) -> _Start | None:
    """None for a new model. A run that resumes no longer needs its `init_from`."""
    path = config.init_from
    if resumed is not None:
        return _Start(resumed, True, native.read_config(resumed))
    if path is None:
        return None
    try:
        if native.is_native(path):
            folder = native.find(path)
            return _Start(folder, True, native.read_config(folder))
        folder = hf.find_folder(path)
        return _Start(folder, False, LaneformerConfig.from_json(folder))
    except UserError as error:
        raise UserError(f"init_from: {error}") from None


def _model_config(config: RunConfig, start: _Start | None) -> LaneformerConfig:
    if config.model is not None:
        return config.model.build()
    assert start is not None  # RunConfig requires one of the two
    return start.config


def _tokenizer_path(config: RunConfig, start: _Start | None) -> Path:
    if config.tokenizer is not None:
        return native.tokenizer_file(config.tokenizer)
    assert start is not None
    return native.tokenizer_file(start.folder)


def _chat_template(config: RunConfig, start: _Start | None) -> str | None:
    """The template that the model's chats follow: the data's, else that of the model it starts from.

    Phase sft renders its data with Laneformer's own where the config names none.
    """
    if config.data.chat_template is not None:
        return ChatTemplate.load(config.data.chat_template).source
    if start is None or config.phase == "sft" or not (start.folder / CHAT_TEMPLATE).exists():
        return None
    return ChatTemplate.load(start.folder / CHAT_TEMPLATE).source


def _check_tokenizer(tokenizer: Tokenizer, path: Path, folder: Path) -> None:
    """Raises UserError when `folder` holds a tokenizer with other ids: its model learnt those."""
    own = load_tokenizer(folder)
    if own is not None and not tokenizer.same_ids(own):
        raise UserError(
            f"tokenizer: {path} ({tokenizer.sha256[:12]}) is not the one that the model in {folder}"
            f" learnt with ({own.sha256[:12]}); leave `tokenizer` out to use that"
        )


def _load(start: _Start, shapes: Mapping[str, Any], mesh: Any) -> Params:
    if start.native:
        return native.read_params(start.folder, shapes)
    from flax import nnx

    from laneformer_jax.model import parameter_paths

    model = hf.load(start.folder, dtype=jnp.float32, mesh=mesh)
    params = {p: v[...] for p, v in parameter_paths(nnx.state(model)).items()}
    where = {path: shapes[path].sharding for path in params}
    return jax.jit(lambda same: same, out_shardings=where)(params)


def _dataset(config: RunConfig, tokenizer: Tokenizer, share: tuple[int, int]) -> Any:
    return build_dataset(
        config.data,
        tokenizer,
        seq_len=config.train.seq_len,
        batch_size=config.train.batch_size,
        seed=config.train.seed,
        process_index=share[0],
        process_count=share[1],
    )


def _eval_batches(
    config: RunConfig, tokenizer: Tokenizer, share: tuple[int, int]
) -> Callable[[], AbstractContextManager[Any]] | None:
    if config.eval.interval is None:
        return None
    dataset = build_eval_dataset(
        config.data,
        tokenizer,
        seq_len=config.train.seq_len,
        batch_size=config.train.batch_size // config.train.accumulate,
        sources=config.eval.sources,
        max_batches=config.eval.batches,
        process_index=share[0],
        process_count=share[1],
    )
    return partial(closing, dataset)


def _abstract(
    shardings: TrainState[jax.sharding.Sharding], optimizer: Any, shapes: Mapping[str, Any]
) -> Any:
    """Shapes and shardings of what a checkpoint's optimizer item holds."""
    rng = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0)))
    tree = {"opt_state": jax.eval_shape(optimizer.init, dict(shapes)), "rng": rng}
    where = {"opt_state": shardings.opt_state, "rng": shardings.rng}
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, where
    )


def _check_model(folder: Path, model: LaneformerConfig) -> None:
    changed = _changes(native.read_config(folder).to_dict(), model.to_dict())
    if changed:
        raise UserError(f"{folder}: belongs to another model ({changed})")


def _check_optimizer(folder: Path, now: OptimizerConfig) -> None:
    """Raises UserError when the optimizer's state in `folder` is not of the form that `now` needs."""
    then = native.read_metadata(folder)["run"]["optimizer"]
    held = ("name", then.get("name"), now.name), ("ema", then.get("ema"), now.ema)
    for field, before, after in held:
        # Of a running mean only the decay may change.
        if before != after and (field == "name" or None in (before, after)):
            told = "null" if before is None else before
            raise UserError(
                f"optimizer.{field} = {after}: the state in {folder} is that of {field} {told}; go on"
                f" with optimizer.{field}={told}, or begin a run in another folder from its"
                f" parameters: init_from={folder}"
            )


def _tell_changes(config: RunConfig, restored: Restored) -> None:
    """Warn of what differs from when the checkpoint was written."""
    changed = _changes(restored.metadata["environment"], native.environment())
    if changed:
        warnings.warn(f"resuming, but not bit for bit, since this differs: {changed}", stacklevel=4)
    changed = _changes(_flat(restored.metadata["run"]), _flat(settings.to_dict(config)))
    if changed:
        warnings.warn(f"resuming with other settings: {changed}", stacklevel=4)


def _continue_data(batches: BatchIterator, restored: Restored) -> None:
    try:
        batches.set_state(restored.metadata["data_state"])
    except UserError as error:
        raise UserError(f"{restored.folder}: {error} (--restart-data)") from None


def _changes(then: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    names = [k for k in {**then, **now} if then.get(k) != now.get(k)]
    return "; ".join(f"{k}: {then.get(k)} then, {now.get(k)} now" for k in names)


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            out |= _flat(value, f"{prefix}{key}.")
        else:
            out[f"{prefix}{key}"] = value
    return out
