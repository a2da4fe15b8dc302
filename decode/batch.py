"""Batches of token ids in, token ids out: what evaluation, tests and benchmarks call.

Shapes: B batch, P prompt length, V vocabulary.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, Unpack

import numpy as np

from decode.engine import BURST, Engine, room
from decode.loop import STOPPED
from decode.request import OVERFLOW, Sampling, check_choice, check_int
from laneformer_jax.costs import PREFILL_CHUNK
from laneformer_jax.errors import UserError
from laneformer_jax.inputs import as_array
from laneformer_jax.model import Laneformer


@dataclass(frozen=True)
class Generation:
    """What `generate` returns."""

    tokens: np.ndarray  # int32 [B, new]; after a row's end token, that token again
    logits: np.ndarray | None = None  # float32 [B, new, V]: logits[:, t] chose tokens[:, t]


class Options(TypedDict, total=False):
    """What both `generate` and `stream` take besides.

    eos_token_id: a row ends with this token, and the call when all rows have; None (default): never.
    seed: of the draws at a temperature above 0 (default 0).
    prefill_chunk: prompt tokens per prefill step; None (default): the engine's.
    burst: tokens per round trip to the device; None (default): the engine's.
    overflow: when prompt and new tokens exceed `max_position_embeddings`, `refuse` (default) or `cut`
        the number of new tokens.
    """

    eos_token_id: int | None
    seed: int
    prefill_chunk: int | None
    burst: int | None
    overflow: Literal["refuse", "cut"]


def generate(
    model: Laneformer,
    prompt_ids: Any,
    max_new_tokens: int,
    temperature: float = 0.0,
    attention_mask: Any = None,
    *,
    return_logits: bool = False,
    **options: Unpack[Options],
) -> Generation:
    """Continue every prompt by up to `max_new_tokens` tokens.

    Args:
        prompt_ids: int [B, P]. Shorter prompts are padded on the left, and
        attention_mask: int or bool [B, P] is 0 there.
        temperature: 0 takes the likeliest token, above 0 samples.
        return_logits: also return the logits behind every token.
        options: see `Options`.

    Raises:
        UserError: an empty or badly padded prompt, ids outside the vocabulary, no room in the context.
    """
    bursts = list(
        _bursts(
            model,
            prompt_ids,
            max_new_tokens,
            temperature,
            attention_mask,
            return_logits,
            **options,
        )
    )
    tokens = np.concatenate([tokens for tokens, _ in bursts], axis=1)
    if not return_logits:
        return Generation(tokens)
    return Generation(tokens, np.concatenate([logits for _, logits in bursts], axis=1))


def stream(
    model: Laneformer,
    prompt_ids: Any,
    max_new_tokens: int,
    temperature: float = 0.0,
    attention_mask: Any = None,
    **options: Unpack[Options],
) -> Iterator[np.ndarray]:
    """As `generate`, yielding int32 [B, n] as soon as the next n tokens are there."""
    bursts = _bursts(
        model, prompt_ids, max_new_tokens, temperature, attention_mask, False, **options
    )
    for tokens, _ in bursts:
        yield tokens


def _bursts(
    model: Laneformer,
    prompt_ids: Any,
    max_new_tokens: int,
    temperature: float,
    attention_mask: Any,
    return_logits: bool,
    *,
    eos_token_id: int | None = None,
    seed: int = 0,
    prefill_chunk: int | None = None,
    burst: int | None = None,
    overflow: Literal["refuse", "cut"] = "refuse",
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    ids_BP, mask_BP = _checked_prompt(model, prompt_ids, attention_mask)
    check_int("max_new_tokens", max_new_tokens, 1)
    check_choice("overflow", overflow, OVERFLOW)
    limit = model.config.max_position_embeddings
    new = room(ids_BP.shape[1], max_new_tokens, limit, overflow)
    sampling = Sampling(temperature=temperature, seed=seed)
    stops: tuple[int, ...] = ()
    if eos_token_id is not None:
        check_int("eos_token_id", eos_token_id, 0, model.config.vocab_size - 1)
        stops = (eos_token_id,)
    chunk = PREFILL_CHUNK if prefill_chunk is None else prefill_chunk
    engine = Engine(model, prefill_chunk=chunk, burst=BURST if burst is None else burst)
    prompts = [ids[mask] for ids, mask in zip(ids_BP, mask_BP, strict=True)]
    for out in engine.run(prompts, new, sampling, stops=stops, logits=return_logits):
        made = int(out.count_B.max())
        ended_Bt = np.arange(made) >= out.count_B[:, None]
        # Only a row that met its end token has fewer.
        assert not ended_Bt.any() or (out.status_B[ended_Bt.any(axis=1)] == STOPPED).all()
        tokens = np.where(ended_Bt, eos_token_id or 0, out.tokens_Bt[:, :made])
        yield (
            tokens,
            out.logits_BtV[:, :made, : model.config.vocab_size] if return_logits else tokens,
        )


def _checked_prompt(
    model: Laneformer, prompt_ids: Any, attention_mask: Any
) -> tuple[np.ndarray, np.ndarray]:
    ids = np.asarray(as_array("prompt_ids", prompt_ids))
    if ids.ndim != 2 or ids.size == 0:
        raise UserError(f"prompt_ids: shape {ids.shape} must be [batch, length], neither of them 0")
    if not np.issubdtype(ids.dtype, np.integer):
        raise UserError(f"prompt_ids: dtype {ids.dtype} must be an integer type")
    vocab = model.config.vocab_size
    if ids.min() < 0 or ids.max() >= vocab:
        raise UserError(f"prompt_ids: ids {ids.min()}…{ids.max()} must lie in 0…{vocab - 1}")
    mask = np.ones(ids.shape, bool)
    if attention_mask is not None:
        mask = np.asarray(as_array("attention_mask", attention_mask)).astype(bool)
        if mask.shape != ids.shape:
            raise UserError(
                f"attention_mask: shape {mask.shape} must be that of prompt_ids {ids.shape}"
            )
        if not mask[:, -1].all() or (np.diff(mask.astype(np.int8), axis=1) < 0).any():
            raise UserError("attention_mask: prompts must be padded on the left only")
    return ids.astype(np.int32), mask
