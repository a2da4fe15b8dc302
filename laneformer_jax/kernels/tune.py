"""`laneformer tune`: measure block sizes, warps and stages on this machine's GPU, and write its table."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from laneformer_jax.errors import UserError

if TYPE_CHECKING:
    from laneformer_jax.config import LaneformerConfig
    from laneformer_jax.kernels.backend import Backend
    from laneformer_jax.kernels.tuning import Tuning

# Of a launch; whatever does not divide a size is cut down to what does.
ROWS, COLUMNS, WARPS = (2, 4, 8, 16, 32), (128, 256, 512, 1024), (2, 4, 8)
SPLITS, KEYS, STAGES = (8, 16, 32, 64), (32, 64, 128), (1, 2, 3)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `laneformer tune`."""
    parser.add_argument(
        "model",
        nargs="*",
        default=["laneformer-2b"],
        metavar="PRESET [FIELD=VALUE …]",
        help="shape to tune for (default: laneformer-2b)",
    )
    parser.add_argument(
        "--lanes",
        type=int,
        metavar="N",
        help="of one GPU, where they are spread over several (default: all)",
    )
    parser.add_argument(
        "--context", type=int, default=2048, metavar="N", help="tokens in the cache (default 2048)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="where to write (default: where the engine looks for this kind of GPU)",
    )


def run(args: argparse.Namespace) -> int:
    """Measure and write; 0.

    Raises:
        UserError: no GPU that the kernels run on, or sizes that the model cannot have.
    """
    import jax

    from laneformer_jax import settings
    from laneformer_jax.kernels import tuning
    from laneformer_jax.kernels.backend import Backend
    from laneformer_jax.presets import preset

    device = jax.devices()[0]
    base = tuning.for_device(device)
    if base is None:
        raise UserError(
            f"tune: needs a GPU of NVIDIA from compute capability 8.0, or gfx942; this machine has "
            f"{device.platform} ({device.device_kind})"
        )
    config = settings.replace(preset(args.model[0]), args.model[1:])
    lanes = config.num_lanes if args.lanes is None else args.lanes
    if not 1 <= lanes <= config.num_lanes:
        raise UserError(f"--lanes: {lanes} must be from 1 to num_lanes {config.num_lanes}")
    if not 1 <= args.context < config.max_position_embeddings:
        raise UserError(
            f"--context: {args.context} must be from 1 to {config.max_position_embeddings - 1}"
        )
    at = Setup(
        config,
        Backend(),
        lanes,
        args.context,
        # Each further stage of a program that stays fails to compile on AMD.
        stages=STAGES if tuning.family(device) == "sm_90" else STAGES[:1],
        most_programs=max(1, int(device.core_count) - tuning.SPARE),
    )
    found = tune(at, base)
    path = args.out or tuning.tuned_path(device)
    what = f"{device.device_kind}: {' '.join(args.model)}, {lanes} lanes, context {args.context}"
    write(found, path, f"Measured by `laneformer tune` on {what}.")
    print(f"wrote {path}")
    return 0


@dataclass(frozen=True)
class Setup:
    """What is tuned, and over which values."""

    config: LaneformerConfig
    backend: Backend
    lanes: int
    context: int
    stages: tuple[int, ...] = STAGES
    most_programs: int = 1
    rows: tuple[int, ...] = ROWS
    columns: tuple[int, ...] = COLUMNS
    warps: tuple[int, ...] = WARPS
    splits: tuple[int, ...] = SPLITS
    keys: tuple[int, ...] = KEYS
    repeats: int = 5
    tokens: int = 32
    working_set: float = 256e6


def tune(at: Setup, base: Tuning) -> Tuning:
    """The table whose launches were fastest: operation by operation, then whole tokens.

    Every candidate is compared with float32 before it is timed; one that does not compile is left out.

    Raises:
        UserError: a kernel's result is off, or none of its candidates compiles.
    """
    from laneformer_jax.kernels.cases import CASES, Prepared, Sizes

    table = base
    for name, (_, field) in CASES.items():
        prepared = Prepared(name, Sizes(at.config, at.lanes, at.context), at.working_set)
        times: dict[Any, float] = {}
        for blocks in _candidates(at, getattr(base, field)):
            tried = replace(table, **{field: blocks})
            took = _time(lambda p=prepared, t=tried: p.measure(at.backend, t, at.repeats).seconds)
            if took is not None:
                times[blocks] = took
        if not times:
            raise UserError(
                f"tune: {name}: no blocks compile on this device, those shipped neither"
            )
        best = min(times, key=times.__getitem__)
        table = replace(table, **{field: best})
        before = times.get(getattr(base, field), max(times.values()))
        gb_s = prepared.bytes / times[best] / 1e9
        print(
            f"{name:<14} {1e6 * times[best]:9.1f} µs ({1e6 * before:.1f} before)  {gb_s:7,.0f} GB/s  "
            f"of {len(times)}: {_shown(best)}",
            flush=True,
        )
    return _whole_tokens(at, table)


def write(table: Tuning, path: Path, what: str) -> None:
    """Write a table as YAML that `tuning.for_device` reads."""
    from laneformer_jax import settings
    from laneformer_jax.files import atomic_file

    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as file:
        file.write(f"# {what}\n{settings.to_yaml(table)}")


def _candidates(at: Setup, base: Any) -> Iterator[Any]:
    """What is shipped, and the grid."""
    from laneformer_jax.kernels.tuning import Keys, Launch, Rows

    yield base
    if isinstance(base, Rows):
        for rows, columns, warps in itertools.product(at.rows, at.columns, at.warps):
            # No more than 64 numbers of a tile in each thread: beyond that registers spill.
            if 32 * warps <= rows * columns <= 64 * 32 * warps:
                yield Rows(rows, columns, Launch(warps))
    else:
        grid = itertools.product(at.splits, at.keys, at.warps, at.stages)
        for splits, keys, warps, stages in grid:
            yield Keys(splits, keys, Launch(warps, stages))


def _whole_tokens(at: Setup, table: Tuning) -> Tuning:
    """With the programs of whole layers, and the way of launching, that are fastest by whole tokens."""
    from laneformer_jax.kernels import whole_token
    from laneformer_jax.kernels.choose import unsupported
    from laneformer_jax.kernels.names import LAUNCHES
    from laneformer_jax.kernels.step import Kernels
    from laneformer_jax.kernels.tuning import Launch, Programs

    config, alone = at.config, at.lanes == at.config.num_lanes
    graph, params, w_VD = whole_token.build(config)
    if not alone:
        import jax

        params = jax.tree.map(lambda x: x[: at.lanes] if x.ndim == 3 else x, params)
        w_VD = w_VD[: config.vocab_size * at.lanes // config.num_lanes]

    def time(table: Tuning, launches: str) -> float | None:
        kernels = Kernels(at.backend, table, launches)

        def token() -> float:
            room = at.context + at.tokens
            state = whole_token.random_state(kernels, config, at.lanes, room)
            one = whole_token.by_kernels(kernels, graph, config.num_lanes)
            counts = (at.tokens, at.repeats)
            return whole_token.seconds_per_token(one, params, w_VD, at.context, state, *counts)

        return _time(token)

    ways = [name for name in LAUNCHES if unsupported(config, name, alone) is None]
    tables: dict[Any, Tuning] = {"fused": table}
    times = {"fused": time(table, "fused")}
    for launches in ways[1:]:
        tried = [table] if launches == "token" else []
        if launches == "layer":
            for warps, share in itertools.product(at.warps, (1, 2)):
                count = max(1, at.most_programs // share)
                tried.append(replace(table, layer=Programs(count, Launch(warps))))
        results = [
            (took, i) for i, t in enumerate(tried) if (took := time(t, launches)) is not None
        ]
        if results:
            times[launches], fastest = min(results)
            tables[launches] = table = tried[fastest]
    known: dict[Any, float] = {name: took for name, took in times.items() if took is not None}
    if not known:
        raise UserError("tune: no way of launching whole tokens compiles on this device")
    for name, took in known.items():
        print(f"{name:<14} {1e6 * took:9.1f} µs a token", flush=True)
    best = min(known, key=known.__getitem__)
    return replace(tables[best], layer=table.layer, auto=best)


def _time(measure: Any) -> float | None:
    """Seconds; None for blocks that do not compile, or need more of the GPU than it has."""
    import jax

    try:
        return float(measure())
    except UserError:  # a ValueError, too: a result that is off is no matter of blocks
        raise
    except (jax.errors.JaxRuntimeError, ValueError, NotImplementedError):
        return None


def _shown(blocks: Any) -> str:
    values = {f.name: getattr(blocks, f.name) for f in fields(blocks) if f.name != "launch"}
    values |= {"warps": blocks.launch.warps, "stages": blocks.launch.stages}
    return ", ".join(f"{name} {value}" for name, value in values.items())
