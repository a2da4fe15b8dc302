"""What may be said of a cell: differences to the baseline seed by seed, with confidence intervals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Gap:
    """Loss of a cell minus the baseline's, over the seeds that both have.

    Attributes:
        by_seed: the differences.
        mean: of the differences, nats per token.
        low, high: the 95 % interval of the mean by Student's t; None for a single seed.
    """

    by_seed: Mapping[int, float]
    mean: float
    low: float | None
    high: float | None

    @property
    def verdict(self) -> str:
        """`worse` or `better` than the baseline, or that the seeds do not tell."""
        if self.low is None or self.high is None:
            return "one seed"
        if self.low > 0:
            return "worse"
        return "better" if self.high < 0 else "within noise"


def paired_gap(cell: Mapping[int, float], baseline: Mapping[int, float]) -> Gap | None:
    """The gap between losses by seed; None when they share no seed."""
    common = sorted(cell.keys() & baseline.keys())
    if not common:
        return None
    by_seed = {seed: cell[seed] - baseline[seed] for seed in common}
    mean = statistics.fmean(by_seed.values())
    if len(common) == 1:
        return Gap(by_seed, mean, None, None)
    half = half_width(list(by_seed.values()))
    return Gap(by_seed, mean, mean - half, mean + half)


def half_width(values: list[float]) -> float:
    """Half the 95 % interval of the mean of at least two values (Student's t)."""
    from scipy.stats import t

    quantile = float(t.ppf((1 + CONFIDENCE) / 2, len(values) - 1))
    return quantile * statistics.stdev(values) / math.sqrt(len(values))
