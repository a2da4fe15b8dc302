"""The benchmark's plumbing; what it measures is nobody's to test."""

import sys

import pytest

from laneformer_jax.errors import UserError
from laneformer_jax.peer import PeerProcess
from train import bench


def test_both_sides_have_the_same_shape():
    from laneformer_jax.config import LaneformerConfig

    eight, one = (LaneformerConfig(**bench.SHAPE, num_lanes=lanes) for lanes in (8, 1))
    assert eight.num_parameters() == one.num_parameters() == 41_951_744
    assert eight.broadcast_delay == 2


def test_a_python_without_the_peer_is_named(monkeypatch, tmp_path):
    script = tmp_path / "python"
    script.write_text(f"#!/bin/sh\nexec {sys.executable} -c 'import a_package_that_is_missing'\n")
    script.chmod(0o755)
    with pytest.raises(UserError, match=r"cannot run the peer \(ModuleNotFoundError: .*--no-peer"):
        bench.Peer(str(script))


def test_a_module_beside_the_peers_script_does_not_shadow_the_standard_librarys(tmp_path):
    """train/profile.py did, and PyTorch could not be imported."""
    (tmp_path / "profile.py").write_text("raise ImportError('not the standard library')")
    script = tmp_path / "peer.py"
    script.write_text("import json, profile; print(json.dumps({'versions': profile.__file__}))")
    peer = PeerProcess("train", sys.executable, script, {})
    assert not peer.about["versions"].startswith(str(tmp_path))
    peer.close()


def test_the_peer_answers_each_step(tmp_path):
    script = tmp_path / "python"
    body = (
        'import sys, json; print(json.dumps({"versions": "v"}), flush=True)\n'
        'for line in sys.stdin: print(json.dumps({"seconds": len(line)}), flush=True)\n'
    )
    (tmp_path / "peer.py").write_text(body)
    script.write_text(f"#!/bin/sh\nexec {sys.executable} {tmp_path / 'peer.py'}\n")
    script.chmod(0o755)
    peer = bench.Peer(str(script))
    assert (peer(), peer(), peer.versions) == (5.0, 5.0, "v")
    peer.close()
