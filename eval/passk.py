"""pass@k: the unbiased estimator of Chen et al. (2021), arXiv 2107.03374, and its uncertainty."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

KS = (1, 10, 100)
_RESAMPLES = 2000
_SEED = 0
_Z95 = 1.959963984540054


def pass_at_k(n: int, c: int, k: int) -> float:
    """Probability that at least one of `k` samples drawn from `n`, of which `c` pass, passes.

    1 − C(n−c, k) / C(n, k), eq. 1 of arXiv 2107.03374, as a product that cannot overflow.

    Raises:
        ValueError: not 0 ≤ c ≤ n and 1 ≤ k ≤ n.
    """
    if not 0 <= c <= n or not 1 <= k <= n:
        raise ValueError(f"pass@{k} of {c} passing samples out of {n} is not defined")
    if n - c < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(n - c + 1, n + 1))


@dataclass(frozen=True)
class Estimate:
    """A mean over tasks with a 95 % confidence interval."""

    k: int
    value: float
    low: float
    high: float


def estimate(counts: Sequence[tuple[int, int]], k: int) -> Estimate:
    """pass@k of a suite.

    Args:
        counts: for each task, samples and passing samples.
        k: at most the smallest number of samples.

    The interval is for the same model on tasks like these. With one sample per task it is Wilson's
    score interval of the share of solved tasks; with more, the 95 % range of the mean over tasks
    drawn with replacement (percentile bootstrap, 2,000 draws, fixed seed).

    Raises:
        ValueError: no tasks, or a task with fewer than `k` samples.
    """
    if not counts:
        raise ValueError("no tasks")
    values = np.array([pass_at_k(n, c, k) for n, c in counts])
    mean = float(values.mean())
    if all(n == 1 for n, _ in counts):
        low, high = _wilson(int(values.sum()), len(values))
    else:
        rng = np.random.default_rng(_SEED)
        draws = rng.integers(0, len(values), size=(_RESAMPLES, len(values)))
        low, high = np.quantile(values[draws].mean(axis=1), [0.025, 0.975])
    return Estimate(k, mean, float(low), float(high))


def estimates(counts: Sequence[tuple[int, int]], ks: Sequence[int] = KS) -> list[Estimate]:
    """`estimate` for each k that every task has samples for."""
    fewest = min((n for n, _ in counts), default=0)
    return [estimate(counts, k) for k in ks if k <= fewest]


def _wilson(passed: int, total: int) -> tuple[float, float]:
    """Wilson (1927) score interval at 95 %."""
    share, z2 = passed / total, _Z95**2
    center = (share + z2 / (2 * total)) / (1 + z2 / total)
    half = _Z95 / (1 + z2 / total) * math.sqrt(share * (1 - share) / total + z2 / (4 * total**2))
    return max(0.0, center - half), min(1.0, center + half)
