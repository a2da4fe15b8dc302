"""Shares of a mixture: exact by tokens over any long run, also while they change."""

from itertools import islice

import grain
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.config import DataConfig, SchedulePoint
from data.mixture import Mixture, Weights
from laneformer_jax import settings as run_settings
from laneformer_jax.errors import UserError


def stream(lengths, source, repeat=True):
    documents = [
        {"example": np.full((n, 2), source, np.int32), "bytes": n, "truncated": 0, "skip": 0}
        for n in lengths
    ]
    ds = grain.MapDataset.source(documents)
    ds = ds.repeat() if repeat else ds
    return ds.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))


def mixture(lengths, weights, repeat=True):
    names = [f"s{i}" for i in range(len(lengths))]
    streams = [stream(ls, i, repeat) for i, ls in enumerate(lengths)]
    if not isinstance(weights, Weights):
        weights = Weights.constant(weights)
    return Mixture(streams, names, weights, [len(ls) for ls in lengths])


def tokens_of(documents, sources):
    out = np.zeros(sources)
    for d in documents:
        out[d["example"][0, 0]] += len(d["example"])
    return out


def examples(documents, n):
    return [d["example"].tolist() for d in islice(documents, n)]


@settings(max_examples=60, deadline=None)
@given(
    sources=st.lists(
        st.tuples(
            st.lists(st.integers(1, 200), min_size=1, max_size=6),
            st.floats(0.05, 10, allow_nan=False),
        ),
        min_size=2,
        max_size=4,
    ),
    n=st.integers(1, 400),
)
def test_shares_are_exact_up_to_a_document_at_every_moment(sources, n):
    lengths, weights = zip(*sources, strict=True)
    it = iter(mixture(lengths, weights))
    shares = np.asarray(weights) / sum(weights)
    got = np.zeros(len(lengths))
    longest = max(map(max, lengths))
    for _ in range(n):
        d = next(it)
        got[d["example"][0, 0]] += len(d["example"])
        assert (np.abs(got - shares * got.sum()) <= len(lengths) * longest).all()


def test_shares_over_a_long_run():
    """A 30 % source of long documents beside a 70 % source of short ones."""
    it = iter(mixture([[1000, 3000], [10, 20, 30]], [0.3, 0.7]))
    got = tokens_of([next(it) for _ in range(12_000)], 2)
    assert abs(got[0] / got.sum() - 0.3) < 0.004


@settings(max_examples=30, deadline=None)
@given(cut=st.integers(0, 60), data=st.data())
def test_resume(cut, data):
    lengths = data.draw(
        st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=9), min_size=1, max_size=3)
    )
    repeat = data.draw(st.booleans())
    make = lambda: mixture(lengths, [1.0, 2.0, 0.5][: len(lengths)], repeat)  # noqa: E731
    expected = examples(make(), cut + 5)
    first = iter(make())
    seen = examples(first, cut)
    second = iter(make())
    second.set_state(first.get_state())
    assert seen + examples(second, 5) == expected


def test_a_source_that_ends_leaves_the_others_their_proportions():
    it = iter(mixture([[10] * 5, [10] * 300, [10] * 100], [0.5, 0.3, 0.1], repeat=False))
    documents = list(it)
    assert len(documents) == 405
    rest = tokens_of(documents[60:360], 3)
    assert rest[0] == 0
    assert rest[1] / rest[2] == pytest.approx(3, rel=0.05)


def test_a_ramp_follows_its_line():
    points = [SchedulePoint(0, {"s0": 1.0}), SchedulePoint(10_000, {"s0": 1, "s1": 3})]
    it = iter(mixture([[10], [10]], Weights.scheduled(points, ["s0", "s1"], 1)))
    documents = [next(it) for _ in range(3000)]
    early, middle = tokens_of(documents[:100], 2), tokens_of(documents[450:550], 2)
    late = tokens_of(documents[1000:], 2)
    assert early[1] / early.sum() < 0.15
    assert middle[1] / middle.sum() == pytest.approx(1.5 / 2.5, abs=0.05)
    assert late[1] / late.sum() == pytest.approx(0.75, abs=0.005)


def test_a_schedule_counts_the_tokens_of_all_streams():
    weights = Weights.scheduled(
        [SchedulePoint(1000, {"a": 1}), SchedulePoint(3000, {"b": 1})], "ab", 4
    )
    assert list(weights.at(0)) == [1, 0]
    assert list(weights.at(250)) == [1, 0]
    assert list(weights.at(500)) == [0.5, 0.5]
    assert list(weights.at(750)) == [0, 1]
    assert list(weights.at(10**9)) == [0, 1]


def test_a_source_with_no_share_left_is_not_read():
    points = [SchedulePoint(0, {"s0": 1, "s1": 1}), SchedulePoint(100, {"s0": 1})]
    it = iter(mixture([[10], [10]], Weights.scheduled(points, ["s0", "s1"], 1)))
    documents = [next(it) for _ in range(100)]
    assert tokens_of(documents[12:], 2)[1] == 0


@pytest.mark.parametrize(
    ("schedule", "found"),
    [
        ([{"tokens": 0, "weights": {"b": 1}}], r"schedule.0.weights.b: no such source"),
        (
            [{"tokens": 0, "weights": {"a": -1}}],
            r"weights.a = -1.0: must be a finite number, at least 0",
        ),
        ([{"tokens": 0, "weights": {"a": 0}}], r"weights: at least one must be above 0"),
        (
            [{"tokens": 5, "weights": {"a": 1}}, {"tokens": 5, "weights": {"a": 1}}],
            r"schedule.1.tokens = 5: must be above the last",
        ),
    ],
)
def test_bad_schedules_are_refused(schedule, found):
    sources = {"a": {"kind": "stdlib"}}
    with pytest.raises(UserError, match=found):
        run_settings.from_dict(DataConfig, {"sources": sources, "schedule": schedule})
