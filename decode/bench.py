"""Speed of decoding on this machine: time to first token, tokens per second of one request, and of several.

Each round measures the memory's read rate, one request, a request with several samples, and a dense Llama in
PyTorch, so that a slow minute slows all of them; medians are reported. Nothing is measured
before the tokens were compared with those of full forward passes. Weights are random: they cost the same.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from laneformer_jax.kernels.names import KERNELS
from laneformer_jax.peer import PeerProcess, add_peer_arguments

if TYPE_CHECKING:
    from decode.engine import Engine
    from laneformer_jax.model import Laneformer

MODEL = ("350m", "num_hidden_layers=15", "swa_layers=[0,1,2,3,4,5,6,7,8,9]")  # 301M parameters
READ_BYTES = 512 * 2**20  # of the array whose reading is the ceiling; more than any cache holds
READ_SECONDS = 0.2  # of one measurement at least: one pass is over before clock rates settle


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `laneformer bench decode`."""
    parser.add_argument(
        "model",
        nargs="*",
        default=list(MODEL),
        metavar="PRESET [FIELD=VALUE …]",
        help=f"shape of the model (default: {' '.join(MODEL)}: 301M parameters)",
    )
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--weights", default="native", choices=("native", "int8"))
    parser.add_argument("--kernels", default="xla", choices=KERNELS, help="of the decode step")
    parser.add_argument("--prompt", type=int, default=64, metavar="N", help="tokens (default 64)")
    parser.add_argument("--new", type=int, default=64, metavar="N", help="tokens (default 64)")
    parser.add_argument(
        "--samples", type=int, default=4, metavar="N", help="of the aggregate speed (default 4)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="of which medians are reported")
    parser.add_argument(
        "--contexts",
        type=int,
        nargs="+",
        default=[],
        metavar="N",
        help="also at these prompt lengths",
    )
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="tokens/s over context, as an image"
    )
    add_peer_arguments(parser)
    parser.add_argument("--json", action="store_true", help="end with all figures as a JSON line")


def run(args: argparse.Namespace) -> int:
    """Measure and print; 0. Raises UserError for sizes that the model cannot take."""
    from decode.request import check_int
    from laneformer_jax import settings
    from laneformer_jax.errors import UserError
    from laneformer_jax.presets import preset

    for name, least in (("prompt", 1), ("new", 2), ("samples", 1), ("rounds", 1)):
        check_int(f"--{name}", getattr(args, name), least)
    config = settings.replace(preset(args.model[0]), args.model[1:])
    longest = max([args.prompt, *args.contexts])
    if longest + args.new > config.max_position_embeddings:
        raise UserError(
            f"--contexts: {longest} tokens and {args.new} new ones exceed max_position_embeddings "
            f"{config.max_position_embeddings}"
        )
    if args.plot and not args.contexts:
        raise UserError("--plot: needs --contexts, two or more prompt lengths")
    figures = measure(config, args)
    _print(figures)
    if args.plot:
        _plot(figures, args.plot)
    if args.json:
        print(json.dumps(figures))
    return 0


def measure(config: Any, args: argparse.Namespace) -> dict[str, Any]:
    """The figures of `--json`. Raises UserError when the tokens are not the reference's."""
    import jax
    from flax import nnx

    from decode.engine import Engine
    from laneformer_jax.model import Laneformer

    peer = None if args.no_peer else Peer(args.peer_python, config)
    try:
        model = Laneformer(config, rngs=nnx.Rngs(0), dtype=args.dtype)
        engine = Engine(model, weights=args.weights, kernels=args.kernels)
        checked = check(engine, model, args, args.prompt)
        ceiling = Ceiling()
        one, several = Timed(engine, args.prompt, args.new), None
        if args.samples > 1:
            several = Timed(engine, args.prompt, args.new, args.samples)
        runs: dict[str, list[Any]] = {"one": [], "several": [], "peer": []}
        for turn in range(args.rounds + 1):  # the first, which compiles, is not counted
            ceiling.measure()
            for name, timed in (("one", one), ("several", several), ("peer", peer)):
                if timed is not None:
                    ceiling.measure()
                    seconds = timed(args.prompt, args.new)
                    if turn:
                        runs[name].append(seconds)
    finally:
        if peer is not None:
            peer.close()
    speed = rate(runs["one"])
    figures: dict[str, Any] = {
        **_shape(engine, config, args, args.prompt),
        "tok_s": speed["tok_s"],
        "time_to_first_token_s": speed["first_s"],
        "gb_s": None,
        "read_ceiling_gb_s": ceiling.gb_s,
        "share_of_read_ceiling": None,
        "checked": checked,
    }
    figures["gb_s"] = figures["bytes_per_token"] * speed["tok_s"] / 1e9
    figures["share_of_read_ceiling"] = figures["gb_s"] / ceiling.gb_s
    if several is not None:
        figures["samples"] = args.samples
        figures["aggregate_tok_s"] = args.samples * rate(runs["several"])["tok_s"]
    figures["burst"] = engine.burst
    figures["host_us_per_token"] = None
    if hosts := one.host_seconds[1:]:
        figures["host_us_per_token"] = 1e6 * statistics.median(hosts)
    figures["ratio_to_peer"] = None
    if peer is not None:
        theirs = rate(runs["peer"])
        figures["peer_tok_s"] = theirs["tok_s"]
        figures["peer_time_to_first_token_s"] = theirs["first_s"]
        figures["ratio_to_peer"] = speed["tok_s"] / theirs["tok_s"]
        figures["peer"] = peer.what
    if args.contexts:
        figures |= _over_contexts(engine, model, args)
    return figures | {
        "command": shlex.join(["laneformer", *sys.argv[1:]]),
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
        "cores": os.cpu_count(),
    }


def _shape(engine: Engine, config: Any, args: argparse.Namespace, prompt: int) -> dict[str, Any]:
    """What a speed means nothing without."""
    from laneformer_jax import costs

    context = prompt + args.new // 2  # in the middle of the answer
    kv = costs.kv_cache_bytes(config, context, args.dtype)
    return {
        "parameters": config.num_parameters(),
        "dtype": args.dtype,
        "weights": args.weights,
        "kernels": args.kernels,
        "prompt": prompt,
        "new": args.new,
        "context": context,
        "weight_bytes_per_token": engine.weight_bytes,
        "kv_bytes_per_token": kv,
        "bytes_per_token": engine.weight_bytes + kv,
    }


def _over_contexts(engine: Engine, model: Laneformer, args: argparse.Namespace) -> dict[str, Any]:
    """Speeds behind prompts of several lengths, in turn, and at what rate the keys and values that the longer
    ones have more of were read: the slope of the time per token over their bytes, by least squares."""
    timed = {}
    for prompt in args.contexts:
        check(engine, model, args, prompt)  # compiles what is timed
        timed[prompt] = Timed(engine, prompt, args.new)
    ceiling = Ceiling()
    runs: dict[int, list[Any]] = {prompt: [] for prompt in args.contexts}
    for _ in range(args.rounds):
        for prompt, request in timed.items():
            ceiling.measure()
            runs[prompt].append(request(prompt, args.new))
    rows = []
    for prompt in args.contexts:
        speed = rate(runs[prompt])
        shape = _shape(engine, model.config, args, prompt)
        gb_s = shape["bytes_per_token"] * speed["tok_s"] / 1e9
        rows.append(
            {
                "prompt": prompt,
                "context": shape["context"],
                "tok_s": speed["tok_s"],
                "time_to_first_token_s": speed["first_s"],
                "kv_bytes_per_token": shape["kv_bytes_per_token"],
                "gb_s": gb_s,
                "share_of_read_ceiling": gb_s / ceiling.gb_s,
            }
        )
    slope = None
    if len({row["kv_bytes_per_token"] for row in rows}) > 1:
        slope = statistics.linear_regression(
            [row["kv_bytes_per_token"] for row in rows], [1 / row["tok_s"] for row in rows]
        ).slope
    kv_gb_s = 1e-9 / slope if slope and slope > 0 else None
    return {"contexts": rows, "contexts_read_ceiling_gb_s": ceiling.gb_s, "kv_gb_s": kv_gb_s}


def rate(runs: list[list[tuple[int, float]]]) -> dict[str, float]:
    """Medians over runs, each a list of (tokens so far, seconds): the first token's time is not decoding."""
    speeds = [(n[-1][0] - n[0][0]) / (n[-1][1] - n[0][1]) for n in runs]
    return {
        "tok_s": statistics.median(speeds),
        "first_s": statistics.median(n[0][1] for n in runs),
    }


class Timed:
    """A request on random tokens; a call runs it and tells (tokens of a sample so far, seconds).

    The first call may compile.

    host_seconds: processor time of this thread per token, of every call: from the first token to the last but
    one of the bursts, in which as many are launched as are read. Calls of fewer than three bursts have none.
    The device's work, also a CPU's, is done by other threads.
    """

    def __init__(self, engine: Engine, prompt: int, new: int, samples: int = 1):
        from decode.request import Request

        self._engine = engine
        self.host_seconds: list[float] = []
        self._request = Request(_tokens(engine.config, prompt), new, n=samples)

    def __call__(self, prompt: int, new: int) -> list[tuple[int, float]]:
        came, seconds, busy = 0, [], []
        began = time.perf_counter()
        for burst in self._engine.stream(self._request):
            came += len(burst.tokens[0])
            seconds.append((came, time.perf_counter() - began))
            busy.append(time.thread_time())
        if len(busy) > 2:
            self.host_seconds.append((busy[-2] - busy[0]) / (seconds[-2][0] - seconds[0][0]))
        return seconds


def _tokens(config: Any, count: int) -> list[int]:
    import numpy as np

    return np.random.default_rng(0).integers(0, config.vocab_size, count).tolist()


def check(engine: Engine, model: Laneformer, args: argparse.Namespace, prompt: int) -> str:
    """Compare the greedy tokens with those of one full forward pass over prompt and answer.

    In bfloat16 logits are a few steps of 2⁻⁸ apart for the same reason that sums are in another order: there
    a token counts as the reference's when its logit is that near to the largest.

    Raises:
        UserError: they differ.
    """
    import jax.numpy as jnp
    import numpy as np

    from decode.request import Request
    from decode.weights import dequantised
    from laneformer_jax.errors import UserError

    ids = _tokens(model.config, prompt)
    new = [t for b in engine.stream(Request(ids, args.new)) for t in b.tokens[0].tolist()]
    reference = dequantised(model) if args.weights == "int8" else model
    whole = reference(jnp.asarray([[*ids, *new]], jnp.int32))
    logits = np.asarray(whole.astype("float32"))[0, prompt - 1 : -1]
    largest = logits.max(axis=-1)
    short = largest - logits[np.arange(len(new)), new]
    allowed = 1e-4 if args.dtype == "float32" else 2**-6 * float(np.abs(logits).max())
    if (short > allowed).any():
        at = int(np.argmax(short > allowed))
        raise UserError(
            f"bench decode: token {at} of the answer to {prompt} tokens is {new[at]}, the full forward "
            f"pass has {int(logits[at].argmax())}: no speed is reported for a wrong result"
        )
    return f"{args.new} greedy tokens equal the full forward's, logits within {allowed:.1g}"


class Ceiling:
    """How fast this machine reads memory: the better of two programs, by median over all turns."""

    def __init__(self) -> None:
        import jax
        import jax.numpy as jnp
        import numpy as np

        self.rates: dict[str, list[float]] = {}
        # Lanes of a matrix that no cache holds, times a vector: XLA with all its threads.
        self._matrix = jnp.ones((8, READ_BYTES // 4 // 8 // 1024, 1024), jnp.float32)
        self._vector = jnp.ones((8, 1024), jnp.float32)
        self._product = jax.jit(lambda m, v: jnp.einsum("li,loi->lo", v, m))
        self._cpu = jax.default_backend() == "cpu"
        self._array = np.ones(READ_BYTES // 4 if self._cpu else 0, np.float32)
        jax.block_until_ready(self._product(self._matrix, self._vector))

    def measure(self) -> None:
        """One more turn."""
        import jax

        def product() -> None:
            jax.block_until_ready(self._product(self._matrix, self._vector))

        self._take("xla matrix × vector", product)
        if self._cpu:
            self._take("numpy dot, a thread per core", self._dot)

    @property
    def gb_s(self) -> float:
        return max(statistics.median(rates) for rates in self.rates.values())

    def _take(self, name: str, work: Any) -> None:
        began, passes, seconds = time.perf_counter(), 0, 0.0
        while not passes or seconds < READ_SECONDS:
            work()
            passes += 1
            seconds = time.perf_counter() - began
        self.rates.setdefault(name, []).append(passes * READ_BYTES / seconds / 1e9)

    def _dot(self) -> None:
        import numpy as np

        cores = os.cpu_count() or 1

        def read(part: Any) -> None:
            for at in range(0, len(part), 8192):  # too short for NumPy's own threads
                np.dot(part[at : at + 8192], part[at : at + 8192])

        threads = [
            threading.Thread(target=read, args=(part,))
            for part in np.array_split(self._array, cores)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


class Peer(PeerProcess):
    """The process with the PyTorch model; a call runs a request and tells (tokens so far, seconds)."""

    def __init__(self, python: str, config: Any):
        names = (
            "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
            "num_key_value_heads max_position_embeddings"
        ).split()
        script = Path(__file__).with_name("bench_peer.py")
        super().__init__("decode", python, script, {name: getattr(config, name) for name in names})
        self.what = (
            f"transformers Llama, {self.about['parameters']:,} parameters, float32, "
            f"{self.about['threads']} threads, {self.about['versions']}"
        )

    def __call__(self, prompt: int, new: int) -> list[tuple[int, float]]:
        seconds = self.ask(json.dumps({"prompt": prompt, "new": new}))["seconds"]
        return [(i + 1, s) for i, s in enumerate(seconds)]


def _print(figures: dict[str, Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(box=box.SIMPLE_HEAD)
    for title in ("figure", "value"):
        table.add_column(title, justify="right" if title == "value" else "left", overflow="fold")
    for name, value in figures.items():
        if name != "contexts":
            shown = (
                f"{value:,.4g}"
                if isinstance(value, float)
                else f"{value:,}"
                if isinstance(value, int)
                else str(value)
            )
            table.add_row(name, shown)
    console.print(table)
    if "contexts" not in figures:
        return
    table = Table(box=box.SIMPLE_HEAD)
    for title in ("prompt", "first token s", "tok/s", "KV MB/token", "GB/s", "share"):
        table.add_column(title, justify="right")
    for row in figures["contexts"]:
        table.add_row(
            f"{row['prompt']:,}",
            f"{row['time_to_first_token_s']:.3f}",
            f"{row['tok_s']:.1f}",
            f"{row['kv_bytes_per_token'] / 1e6:.1f}",
            f"{row['gb_s']:.1f}",
            f"{row['share_of_read_ceiling']:.0%}",
        )
    console.print(table)


def _plot(figures: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = figures["contexts"]
    figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
    axes.plot(
        [r["context"] for r in rows], [r["tok_s"] for r in rows], marker="o", label="measured"
    )
    # What the bytes alone would do to the first of them.
    weights, first = figures["weight_bytes_per_token"], rows[0]
    whole = weights + first["kv_bytes_per_token"]
    axes.plot(
        [r["context"] for r in rows],
        [first["tok_s"] * whole / (weights + r["kv_bytes_per_token"]) for r in rows],
        linestyle="--",
        label="by bytes read, from the first",
    )
    axes.set(
        xlabel="context in tokens",
        ylabel="tokens/s of one request",
        ylim=(0, None),
        title=f"{figures['parameters'] / 1e6:.0f}M parameters, {figures['dtype']}, "
        f"{figures['device']} × {figures['cores']}",
    )
    axes.legend()
    figure.savefig(path)
    plt.close(figure)
