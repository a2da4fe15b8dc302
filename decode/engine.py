"""The engine: one request at a time, its tokens in bursts as they come."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import numpy as np

from decode import batch
from decode.request import Burst, Finish, Request, check_choice, check_int
from laneformer_jax.errors import UserError
from laneformer_jax.model import Laneformer

WEIGHTS = ("native", "int8")
KERNELS = ("xla",)


class Engine:
    """A model laid out for decoding one request at a time.

    Args:
        model: on one device, or over the lane axis of its mesh.
        context: most tokens of prompt and answer together; None: `max_position_embeddings`.
        burst: tokens per round trip to the device. Changes when tokens are seen, never which.
        prefill_chunk: prompt tokens per prefill step.
        weights: `native` keeps the model's dtype, `int8` rounds each output channel to 8 bits.
        kernels: implementation of the decode step.

    Raises:
        UserError: a value of another type or out of range.
    """

    def __init__(
        self,
        model: Laneformer,
        *,
        context: int | None = None,
        burst: int = 16,
        prefill_chunk: int = 512,
        weights: Literal["native", "int8"] = "native",
        kernels: str = "xla",
    ):
        limit = model.config.max_position_embeddings
        if context is not None:
            check_int("context", context, 1, limit)
        check_int("burst", burst, 1)
        check_int("prefill_chunk", prefill_chunk, 1)
        check_choice("weights", weights, WEIGHTS)
        check_choice("kernels", kernels, KERNELS)
        self.config = model.config
        self.context = context or limit
        self._model = model

    def check(self, request: Request) -> int:
        """New tokens that the request will get at most; to call before it is queued.

        Raises:
            UserError: token ids outside the vocabulary, or no room in the context or in memory.
        """
        vocab = self.config.vocab_size
        for name, ids in (
            ("prompt_ids", request.prompt_ids),
            ("stop_token_ids", request.stop_token_ids),
            ("logit_bias", request.sampling.logit_bias),
        ):
            for token in ids:
                if token >= vocab:
                    raise UserError(f"{name}: {token} must be from 0 to {vocab - 1}")
        prompt, new = len(request.prompt_ids), request.max_new_tokens
        if prompt + new <= self.context:
            return new
        if prompt >= self.context or request.overflow == "refuse":
            raise UserError(
                f"prompt of {prompt} tokens plus max_new_tokens {new} exceeds the context of "
                f"{self.context} tokens"
            )
        return self.context - prompt

    def stream(self, request: Request) -> Iterator[Burst]:
        """Bursts of tokens until every sample has finished. Closing the iterator cancels the rest.

        The request is checked at once, before the first token is asked for.

        Raises:
            UserError: as `check`.
        """
        new = self.check(request)
        return self._bursts(request, new)

    def warm_up(self) -> None:
        """Compile what the first plain request needs, so that it does not wait for that."""
        for _ in self.stream(Request([0], 1)):
            pass

    def _bursts(self, request: Request, new: int) -> Iterator[Burst]:
        # Interim: the samplers that the batch functions know. The device loop follows.
        n = request.n
        ids = np.asarray([request.prompt_ids] * n, np.int32)
        finished: list[Finish | None] = [None] * n
        left = new
        for block in batch.stream(
            self._model, ids, new, request.sampling.temperature, seed=request.sampling.seed
        ):
            left -= block.shape[1]
            tokens = []
            for i in range(n):
                row: Any = block[i] if finished[i] is None else block[i, :0]
                at = np.flatnonzero(np.isin(row, request.stop_token_ids))
                if at.size:
                    row, finished[i] = row[: at[0]], "stop"
                elif left == 0 and finished[i] is None:
                    finished[i] = "length"
                tokens.append(row)
            yield Burst(tokens, list(finished), None, None, None, 0, 0)
            if all(finished):
                return
