"""An agent's loop: how much of its wall time is generation, how much its tools."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from laneformer_jax.errors import UserError
from laneformer_jax.files import parse_json

# Made up, not recorded: a coding task of 24 steps and 50,000 generated tokens. Replace it by yours.
EXAMPLE = Path(__file__).with_name("agent_trace.jsonl")


@dataclass(frozen=True)
class Step:
    """One turn: the tokens it generates, then a tool that runs for `tool_seconds`."""

    tokens: int
    tool_seconds: float


@dataclass(frozen=True)
class Loop:
    """Wall time of a trace at one decode speed, in seconds. Reading prompts is not in it."""

    generation: float
    tools: float

    @property
    def share(self) -> float:
        """Of the wall time that is generation."""
        total = self.generation + self.tools
        return self.generation / total if total else 0.0


def generation_seconds(tokens: float, tokens_per_second: float) -> float:
    """Seconds to generate `tokens` one after another."""
    return tokens / tokens_per_second


def loop(steps: Iterable[Step], tokens_per_second: float) -> Loop:
    """The trace's wall time with a model that decodes `tokens_per_second`."""
    steps = list(steps)
    tokens = sum(step.tokens for step in steps)
    return Loop(
        generation_seconds(tokens, tokens_per_second), sum(step.tool_seconds for step in steps)
    )


def read_trace(path: Path) -> list[Step]:
    """Steps from JSON lines with `tokens` and `tool_seconds`; other keys are ignored.

    Raises UserError naming file, line and field.
    """
    steps = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise UserError(f"{path}: cannot be read ({why})") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        values = parse_json(line, where)
        if not isinstance(values, dict):
            raise UserError(f"{where}: must hold a JSON object")
        for name in ("tokens", "tool_seconds"):
            value = values.get(name)
            if (
                isinstance(value, bool)
                or not isinstance(value, int | float)
                or not 0 <= value < 1e12
            ):
                raise UserError(f"{where}: {name}: {value!r} must be a number of at least 0")
        steps.append(Step(int(values["tokens"]), float(values["tool_seconds"])))
    if not steps:
        raise UserError(f"{path}: holds no steps")
    return steps
