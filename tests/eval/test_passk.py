import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eval.passk import estimate, estimates, pass_at_k


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("n", "c", "k", "expected"),
    [(1, 0, 1, 0.0), (1, 1, 1, 1.0), (10, 3, 1, 0.3), (10, 3, 8, 1.0), (200, 1, 100, 0.5)],
)
def test_known_values(n, c, k, expected):
    assert pass_at_k(n, c, k) == pytest.approx(expected, abs=1e-12)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 8).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n)))
)
def test_is_the_share_of_draws_with_a_pass(ncK):
    n, c, k = ncK
    draws = list(itertools.combinations([True] * c + [False] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, draws)) / len(draws), abs=1e-12)


def test_large_n_does_not_overflow():
    exact = 1 - math.comb(99_000, 100) / math.comb(100_000, 100)
    assert pass_at_k(100_000, 1_000, 100) == pytest.approx(exact, rel=1e-9)


@pytest.mark.parametrize(("n", "c", "k"), [(1, 2, 1), (5, 1, 6), (5, -1, 1), (5, 1, 0)])
def test_undefined(n, c, k):
    with pytest.raises(ValueError, match="not defined"):
        pass_at_k(n, c, k)


def test_wilson_interval_of_single_samples():
    got = estimate([(1, 1)] * 8 + [(1, 0)] * 2, 1)
    # Wilson's interval of 8/10, as in any table of it.
    assert (got.value, round(got.low, 4), round(got.high, 4)) == (0.8, 0.4902, 0.9433)


def test_bootstrap_interval_contains_the_mean_and_repeats():
    counts = [(20, i % 21) for i in range(60)]
    got = estimate(counts, 10)
    assert got == estimate(counts, 10)
    assert got.low < got.value < got.high
    assert got.high - got.low < 0.25


def test_only_k_that_every_task_has_samples_for():
    assert [e.k for e in estimates([(100, 5), (12, 1)])] == [1, 10]
    assert estimates([]) == []
