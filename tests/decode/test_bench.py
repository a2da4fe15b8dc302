"""`laneformer bench decode`: what its figures are made of, and that it reports none for a wrong result."""

import argparse
import json

import pytest
from flax import nnx

from decode import Engine, bench
from laneformer_jax import Laneformer, cli
from laneformer_jax.errors import UserError
from laneformer_jax.presets import preset

SHAPE = ["tiny", "vocab_size=64", "num_hidden_layers=2", "broadcast_delay=1"]
RUN = ["bench", "decode", *SHAPE, "--prompt", "5", "--new", "6", "--rounds", "1", "--samples", "2"]


def test_the_first_tokens_time_is_not_decoding():
    runs = [[(1, 2.0), (5, 3.0), (9, 4.0)], [(1, 1.0), (9, 2.0)], [(1, 3.0), (9, 7.0)]]
    assert bench.rate(runs) == {"tok_s": 4.0, "first_s": 2.0}


def test_the_hosts_time_is_that_of_bursts_launched_and_read(monkeypatch):
    """Ticks of this thread: 5 to the first token, then 8 for each burst of four, 1 for what is left."""
    clock, tokens = iter([5, 13, 21, 22]), [[0]] * 1 + [[0] * 4] * 2 + [[0] * 2]
    monkeypatch.setattr(bench.time, "thread_time", lambda: next(clock))

    class Bursts:
        config = preset("tiny", vocab_size=64)

        def stream(self, request):
            return [argparse.Namespace(tokens=[part]) for part in tokens]

    timed = bench.Timed(Bursts(), 3, 11)
    assert [came for came, _ in timed(3, 11)] == [1, 5, 9, 11]
    assert timed.host_seconds == [16 / 8]


def test_the_ceiling_is_of_as_many_passes_as_fill_its_time(monkeypatch):
    monkeypatch.setattr(bench, "READ_BYTES", 2**20)
    ceiling, passes, now = bench.Ceiling(), [], [0.0]
    monkeypatch.setattr(bench.time, "perf_counter", lambda: now[0])

    def work():
        passes.append(1)
        now[0] += bench.READ_SECONDS / 3.5

    ceiling._take("this", work)
    assert len(passes) == 4
    assert ceiling.rates["this"] == [pytest.approx(2**20 / (bench.READ_SECONDS / 3.5) / 1e9)]


def test_json_line(monkeypatch, capsys):
    monkeypatch.setattr(bench, "READ_BYTES", 2**20)
    monkeypatch.setattr(bench, "READ_SECONDS", 0)
    assert cli.main([*RUN, "--no-peer", "--json", "--contexts", "5", "9"]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert figures["gb_s"] == pytest.approx(figures["bytes_per_token"] * figures["tok_s"] / 1e9)
    ceiling = figures["read_ceiling_gb_s"]
    assert figures["share_of_read_ceiling"] == pytest.approx(figures["gb_s"] / ceiling)
    assert figures["ratio_to_peer"] is None
    assert (figures["burst"], figures["host_us_per_token"]) == (32, None)  # one behind the first
    assert figures["aggregate_tok_s"] > 0
    assert [row["context"] for row in figures["contexts"]] == [8, 12]
    # All float32 weights but the embedding table, and two layers' keys and values of 8 positions.
    table = 64 * 128
    assert figures["weight_bytes_per_token"] == 4 * (figures["parameters"] - table)
    assert figures["kv_bytes_per_token"] == 2 * 8 * 2 * 128 * 4


def test_no_speed_for_a_wrong_result():
    config = preset("tiny", vocab_size=64, num_hidden_layers=2, broadcast_delay=1)
    model, other = (Laneformer(config, rngs=nnx.Rngs(seed)) for seed in (0, 1))
    args = argparse.Namespace(new=6, weights="native", dtype="float32")
    with pytest.raises(UserError, match=r"token 0 .* no speed is reported"):
        bench.check(Engine(other), model, args, 5)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--prompt", "1020"], "exceed max_position_embeddings 1024"),
        (["--new", "1"], "--new: 1 must be at least 2"),
        (["--plot", "a.png"], "--plot: needs --contexts"),
        (["--peer-python", "/bin/false"], "cannot run the peer"),
    ],
)
def test_bad_options_are_one_line(more, message, capsys):
    assert cli.main([*RUN, *more]) == 2
    assert message in capsys.readouterr().err
