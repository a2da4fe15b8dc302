import shutil

import pytest

from eval.grading import Grader
from eval.sandbox import probe, seccomp
from eval.sandbox.probe import open_sandbox
from eval.suites import Table, Task
from laneformer_jax.errors import UserError


@pytest.mark.smoke
def test_level_is_what_was_tried():
    assert open_sandbox(bubblewrap=False).level == "landlock+seccomp"
    if shutil.which("bwrap"):
        assert open_sandbox().level == "namespaces+landlock+seccomp"


def test_each_layer_is_needed():
    """Without a layer the probe finds the hole; so it would on a machine that lacks it."""
    whole = open_sandbox(bubblewrap=False)
    assert probe.probe(whole)[0] == []
    assert "read a file" in probe.probe(whole.without("landlock"))[0]
    assert "fork" in probe.probe(whole.without("seccomp"))[0]


def test_refuses_below_landlock_and_seccomp(monkeypatch):
    monkeypatch.setattr(seccomp, "supported", lambda: False)
    with pytest.raises(
        UserError, match=r"Landlock and seccomp are both needed .* --unsafe-no-sandbox"
    ):
        open_sandbox()
    sandbox = open_sandbox(unsafe=True)
    assert sandbox.level == "unsafe"
    table = Table("f", [[1]], [b"i\x01\x00\x00\x00"], ("equal", 0))
    task = Task("Test/0", "", "f", "", lambda: table, ("plus",))
    with Grader(sandbox) as grader:
        assert grader.grade(task, "def f(x): return x").kind == "pass"
        assert grader.grade(task, "def f(x): return 2").kind == "wrong answer"


def test_broken_bubblewrap_is_done_without(monkeypatch, tmp_path):
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(probe, "find_bubblewrap", lambda: str(broken))
    sandbox = open_sandbox()
    assert (sandbox.level, sandbox.bubblewrap) == ("landlock+seccomp", None)


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_filter_is_well_formed(machine):
    """Every jump lands inside the program, and it ends by refusing."""
    code = seccomp.program(machine)
    assert len(code) % 8 == 0
    count = len(code) // 8
    assert count < 4096
    for i in range(count):
        op = int.from_bytes(code[8 * i : 8 * i + 2], "little")
        if op & 7 == 5:
            assert i + 1 + max(code[8 * i + 2], code[8 * i + 3]) < count
    assert code[-8:] == b"\x06\x00\x00\x00" + (0x00050001).to_bytes(4, "little")
    numbers = [n[machine == "aarch64"] for n in seccomp._CALLS.values()]
    known = [n for n in numbers if n is not None]
    assert len(set(known)) == len(known)
