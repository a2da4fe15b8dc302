"""The engine: one request at a time, its tokens in bursts as they come.

Shapes: B rows (samples of a request, or prompts of a batch), T positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from decode import loop, speculate
from decode.loop import FULL, RUNNING, STOPPED, Inputs, Out, Plan, State
from decode.request import Burst, Finish, Request, Sampling, check_choice, check_int
from decode.sampling import Filters, Knobs, Seen
from decode.weights import Precision, lay_out
from laneformer_jax import costs
from laneformer_jax.cache import RingCache
from laneformer_jax.costs import PREFILL_CHUNK
from laneformer_jax.errors import UserError
from laneformer_jax.kernels.choose import choose
from laneformer_jax.model import Laneformer
from laneformer_jax.sharding import named

BURST = 32
WEIGHTS = ("native", "int8")
LEAST_POSITIONS = 64  # of a cache, and
LEAST_CHUNK = 16  # of a prefill: smaller ones are filled up, so that few are compiled
_FINISH: dict[int, Finish | None] = {RUNNING: None, STOPPED: "stop", FULL: "length"}


class Engine:
    """A model laid out for decoding one request at a time.

    Args:
        model: on one device, or over the lane axis of its mesh. Its arrays are used, not copied, but for
            int8 and for the head over several devices.
        context: most tokens of prompt and answer together; None: `max_position_embeddings`.
        burst: tokens per round trip to the device. Changes when tokens are seen, never which.
        prefill_chunk: prompt tokens per prefill step.
        weights: `native` keeps the model's dtype, `int8` rounds each output channel to 8 bits.
        kernels: implementation of the decode step: `xla` is plain JAX; `fused`, `layer` and `token` are the
            GPU kernels, by how much one launch does; `auto` is what is best on the device. `interpret-fused`
            and so on run them on a CPU, to test them.
        vocab_size: the tokenizer's, where the model has more rows than that: ids from there on have no
            text and are never drawn. None: all are.

    Raises:
        UserError: a value of another type or out of range.
    """

    def __init__(
        self,
        model: Laneformer,
        *,
        vocab_size: int | None = None,
        context: int | None = None,
        burst: int = BURST,
        prefill_chunk: int = PREFILL_CHUNK,
        weights: Precision = "native",
        kernels: str = "xla",
    ):
        limit = model.config.max_position_embeddings
        if context is not None:
            check_int("context", context, 1, limit)
        check_int("burst", burst, 1)
        check_int("prefill_chunk", prefill_chunk, 1)
        check_choice("weights", weights, WEIGHTS)
        device = jax.devices()[0] if model.mesh is None else model.mesh.devices.flat[0]
        kernels = choose(kernels, model.config, device, weights, alone=model.mesh is None)
        self.config = model.config
        self.context = context or limit
        self.burst = burst
        self._chunk, self._kernels = prefill_chunk, kernels
        self._dtype = model.tok_embeddings.weight.dtype
        if vocab_size is not None:
            check_int("vocab_size", vocab_size, 1, model.config.vocab_size)
        self.vocab_size = vocab_size or model.config.vocab_size
        self._layout, self._arrays = lay_out(model, weights, vocab_size)
        self._one, self._whole = self._placed((np.int32(1), np.int32(burst)), (P(), P()))

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that one token reads at batch 1: all but the table of embeddings."""
        table = self.config.vocab_size * self.config.hidden_size * self._dtype.itemsize
        return sum(array.nbytes for array in jax.tree.leaves(self._arrays)) - table

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
        if (request.sampling.logprobs or 0) > self.vocab_size:
            raise UserError(
                f"logprobs: {request.sampling.logprobs} exceeds vocab_size {self.vocab_size}"
            )
        new = room(len(request.prompt_ids), request.max_new_tokens, self.context, request.overflow)
        self._check_memory(request.n, len(request.prompt_ids), new, _draft(request.speculate))
        return new

    def cache_bytes(self, rows: int, prompt: int, new: int, draft: int = 0) -> int:
        """Bytes of the keys and values that a request of these sizes takes, on all devices together."""
        positions, sizes = self._sizes(prompt, new, draft)
        ahead = max([*sizes, draft + 1])
        return rows * costs.kv_ring_bytes(self.config, positions, ahead, self._dtype.name)

    def stream(self, request: Request) -> Iterator[Burst]:
        """Bursts of tokens until every sample has finished. Closing the iterator cancels the rest.

        The request is checked at once, before the first token is asked for. The first burst is one token, so
        that it comes as early as it can.

        Raises:
            UserError: as `check`.
        """
        new = self.check(request)
        outs = self.run(
            [np.asarray(request.prompt_ids, np.int32)],
            new,
            request.sampling,
            copies=request.n,
            stops=request.stop_token_ids,
            draft=_draft(request.speculate),
        )
        return (_as_burst(out, request.sampling) for out in outs)

    def warm_up(self) -> None:
        """Compile what the first plain request needs, so that it does not wait for that."""
        for _ in self.stream(Request([0] * min(2, self.context - 1), 1)):
            pass

    def run(
        self,
        prompts: Sequence[np.ndarray],
        new: int,
        sampling: Sampling,
        *,
        copies: int = 1,
        stops: Sequence[int] = (),
        draft: int = 0,
        logits: bool = False,
    ) -> Iterator[Out]:
        """What `stream` and `decode.batch` share: bursts as the device gave them, in NumPy arrays.

        The next burst is on its way before the last one is read, so that the device does not wait for
        the host; a request that is closed or done wastes one at most.

        Args:
            prompts: int32 each, checked; of one length or not.
            new: most tokens of every row; prompt and answer fit into the context.
            copies: rows of the first prompt, when it is the only one.
            draft: tokens proposed per step.
            logits: return those behind every token.
        """
        state = self._prefilled(prompts, new, sampling, copies, draft)
        lengths = np.asarray([len(p) for p in prompts], np.int32).repeat(copies)
        few = max(4, 1 << (len(stops) - 1).bit_length()) if stops else 4
        inputs = Inputs(
            Knobs.of(sampling, self._layout.rows),
            lengths,
            np.asarray([*stops, *[-1] * (few - len(stops))], np.int32),
            np.int32(new),
        )
        # Once per request, or every burst would send them again.
        inputs = self._placed(inputs, loop.input_specs(inputs))
        plan = Plan(Filters.of(sampling), self.burst, draft, logits, self._kernels)
        left = new

        def launch(steps: jax.Array, count: int) -> Out | None:
            nonlocal state, left
            if left <= 0:
                return None
            left -= count  # every step makes a token at least
            burst = loop.burst_of(self._layout)
            state, out = burst(self._layout, plan, self._arrays, state, inputs, steps)
            return out

        waiting = launch(self._one, 1)
        while waiting is not None:
            following = launch(self._whole, self.burst)
            out = loop.unpacked(waiting)
            yield out
            if RUNNING not in out.status_B.tolist():
                return
            waiting = following

    # Before the first token ----------------------------------------------------------------------

    def _sizes(self, prompt: int, new: int, draft: int) -> tuple[int, list[int]]:
        """Positions of the cache, and the sizes of the prefill's chunks.

        All but the last token of a prompt are prefilled: the first step of the loop takes that one.
        """
        whole, rest = divmod(prompt - 1, self._chunk)
        sizes = [self._chunk] * whole
        if rest:  # filled up on the left
            sizes.insert(0, min(_bucket(rest, LEAST_CHUNK), self._chunk))
        positions = max([prompt + new + draft, *sizes])
        return min(_slots(positions), max(positions, self.context)), sizes

    def _check_memory(self, rows: int, prompt: int, new: int, draft: int) -> None:
        needed = self.cache_bytes(rows, prompt, new, draft)
        devices = 1 if self._layout.mesh is None else self._layout.mesh.devices.size
        free = _free_bytes()
        if free is not None and needed / devices > free:
            raise UserError(
                f"prompt of {prompt} tokens, max_new_tokens {new}, n {rows}: the cache takes "
                f"{needed / devices / 1e9:.1f} GB per device, of which {free / 1e9:.1f} GB are free"
            )

    def _prefilled(
        self, prompts: Sequence[np.ndarray], new: int, sampling: Sampling, copies: int, draft: int
    ) -> State:
        longest = max(map(len, prompts))
        positions, sizes = self._sizes(longest, new, draft)
        ahead = max([*sizes, draft + 1])
        # Shorter prompts, and the first chunk, are filled up on the left: at positions below 0.
        padded = sum(sizes)
        ids_BS = np.zeros((len(prompts), padded), np.int32)
        for row, prompt in zip(ids_BS, prompts, strict=True):
            if len(prompt) > 1:
                row[padded - len(prompt) + 1 :] = prompt[:-1]
        starts_B = np.asarray([len(p) - 1 - padded for p in prompts], np.int32)
        in_blocks = self._kernels == "xla" and self._layout.first_device.platform == "cpu"
        sizes_of = positions, ahead, self._dtype.name, in_blocks
        cache = loop.empty_cache(self._layout, *sizes_of, self._placed(starts_B, P()))
        at = 0
        for size in sizes:
            part = ids_BS[:, at : at + size]
            cache = loop.prefill(self._layout, self._arrays, cache, part)
            at += size
        if copies > 1:
            heads = self.config.num_key_value_heads // self.config.num_lanes
            cache = _copied(cache, heads, copies)
        rows = [p for p in prompts for _ in range(copies)]
        batch = len(rows)
        seen, history_BT = None, None
        if sampling.penalises:
            prompt_Bv = np.zeros((batch, self._layout.rows), bool)
            for row, prompt in zip(prompt_Bv, rows, strict=True):
                row[prompt] = True
            seen = Seen(prompt_Bv, np.zeros(prompt_Bv.shape, np.int32))
        if draft:
            history_BT = np.zeros((batch, positions), np.int32)
            for row, prompt in zip(history_BT, rows, strict=True):
                row[: len(prompt)] = prompt
        newest_B = np.asarray([p[-1] for p in rows], np.int32)
        made_B, status_B = np.zeros(batch, np.int32), np.zeros(batch, np.int32)
        state = State(cache, newest_B, made_B, status_B, seen, history_BT)
        return self._placed(state, loop.state_specs(state))

    def _placed(self, tree: Any, specs: Any) -> Any:
        """`tree` where the weights are, and told to stay there as they are: a program is compiled anew
        for arguments that may move."""
        mesh = self._layout.mesh
        if mesh is None:
            return jax.device_put(tree, self._layout.device)
        return jax.device_put(tree, jax.tree.map(partial(named, mesh), specs))


def room(prompt: int, new: int, context: int, overflow: Literal["refuse", "cut"]) -> int:
    """New tokens that fit behind a prompt. Raises UserError when they do not and shall not be cut."""
    if prompt + new <= context:
        return new
    if prompt >= context or overflow == "refuse":
        raise UserError(
            f"prompt of {prompt} tokens plus max_new_tokens {new} exceeds the context of {context} "
            "tokens"
        )
    return context - prompt


def _draft(name: str | None) -> int:
    return speculate.DRAFT if name else 0


def _bucket(size: int, least: int) -> int:
    """`size` rounded up to a power of two or the middle between two of them."""
    power = max(least, 1 << (size - 1).bit_length())
    return power * 3 // 4 if power > least and size <= power * 3 // 4 else power


def _slots(positions: int) -> int:
    """Of a cache for so many positions: rounded up, so that few are compiled, but as memory and what a token
    reads grow with them to at most a fourth more where they are many."""
    if positions <= 4 * LEAST_POSITIONS:
        return _bucket(positions, LEAST_POSITIONS)
    step = 1 << ((positions - 1).bit_length() - 3)
    return -(-positions // step) * step


@partial(jax.jit, static_argnums=(1, 2))
def _copied(cache: RingCache, heads: int, copies: int) -> RingCache:
    """A cache of one row for each of its samples. heads: of a lane, for keys and values."""

    def copied(ring_GRd: jax.Array) -> jax.Array:
        by_lane = ring_GRd.reshape(-1, 1, heads, *ring_GRd.shape[1:])
        return jnp.repeat(by_lane, copies, axis=1).reshape(-1, *ring_GRd.shape[1:])

    keys, values = jax.tree.map(copied, (cache.keys, cache.values))
    return RingCache(keys, values, jnp.repeat(cache.length_B, copies))


def _free_bytes() -> int | None:
    """Memory left on a device; None when nobody knows."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"] - stats["bytes_in_use"])
    try:
        with open("/proc/meminfo") as lines:
            kilobytes = next(int(line.split()[1]) for line in lines if line.startswith("MemAvail"))
    except (OSError, StopIteration):
        return None
    return kilobytes * 1024


def _as_burst(out: Out, sampling: Sampling) -> Burst:
    """A burst as the caller sees it: without stop tokens, an array per sample."""
    counts, statuses = out.count_B.tolist(), out.status_B.tolist()
    # A row that stopped in an earlier burst has no tokens in this one, its stop token either.
    kept = [max(0, n - (s == STOPPED)) for n, s in zip(counts, statuses, strict=True)]

    def rows(array: np.ndarray) -> list[np.ndarray]:
        return [row[:count] for row, count in zip(array, kept, strict=True)]

    finished = [_FINISH[status] for status in statuses]
    logprobs, ids, tops = None, None, None
    if sampling.logprobs is not None:
        logprobs, ids, tops = map(rows, (out.logprobs_Bt, out.top_ids_Btm, out.top_logprobs_Btm))
    tokens = rows(out.tokens_Bt)
    return Burst(tokens, finished, logprobs, ids, tops, int(out.proposed), int(out.accepted))
