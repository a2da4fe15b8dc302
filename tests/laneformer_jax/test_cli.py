import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import laneformer_jax
from laneformer_jax import cli
from laneformer_jax.errors import UserError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def command(monkeypatch):
    """Make `laneformer try` run the given function on `--steps`, overrides and a nested command."""

    def make(run, nested=False):
        def add_arguments(parser):
            if nested:
                sub = parser.add_subparsers(dest="what", required=True)
                sub.add_parser("train").add_argument("--vocab-size", type=int)
                sub.add_parser("encode")
                return
            parser.add_argument("--steps", type=int)
            parser.add_argument("--seed", type=int)
            parser.add_argument("overrides", nargs="*")

        module = SimpleNamespace(__doc__="Try it.", add_arguments=add_arguments, run=run)
        monkeypatch.setitem(sys.modules, "try_module", module)
        monkeypatch.setitem(cli.COMMANDS, "try", cli.Command("try_module", "try it"))

    return make


def raises(error):
    def run(args):
        raise error

    return run


def err(capsys):
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


def python(code, **kwargs):
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, **kwargs
    )


@pytest.mark.smoke
def test_help_is_fast_and_leaves_jax_alone():
    code = (
        "import sys; from laneformer_jax.cli import main; code = main(['--help']); "
        "assert not {'jax', 'numpy', 'pydantic'} & set(sys.modules); sys.exit(code)"
    )
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        done = python(code)
        seconds.append(time.perf_counter() - start)
        assert done.returncode == 0, done.stderr
        assert "usage: laneformer COMMAND" in done.stdout
        for name, entry in cli.COMMANDS.items():
            assert f"{name} " in done.stdout
            assert entry.help in done.stdout
    assert min(seconds) < 1.0


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_help_of_each_command_does_without_jax(name):
    done = python(
        "import sys; from laneformer_jax.cli import main; "
        f"code = main([{name!r}, '--help']); assert 'jax' not in sys.modules; sys.exit(code)"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: laneformer {name}")


def test_importing_the_package_is_cheap():
    done = python(
        "import sys, laneformer_jax; assert not {'jax', 'numpy', 'argparse'} & set(sys.modules); "
        "assert 'Laneformer' in dir(laneformer_jax)"
    )
    assert done.returncode == 0, done.stderr


def test_lazy_attributes():
    from laneformer_jax.config import LaneformerConfig

    assert laneformer_jax.LaneformerConfig is LaneformerConfig
    with pytest.raises(AttributeError, match="no attribute 'Lanefromer'"):
        _ = laneformer_jax.Lanefromer


def test_version_and_no_arguments(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"laneformer {laneformer_jax.__version__}\n"
    assert cli.main([]) == 0
    assert capsys.readouterr().out.startswith("usage: laneformer COMMAND")


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["quickstrat"], "error: unknown command 'quickstrat' (did you mean 'quickstart'?)\n"),
        (["--verson"], "error: unknown option '--verson' (did you mean '--version'?)\n"),
        (["zzz"], f"error: unknown command 'zzz'; commands: {', '.join(cli.COMMANDS)}\n"),
    ],
)
def test_unknown_commands_and_options(capsys, argv, line):
    assert cli.main(argv) == 2
    assert err(capsys) == line


def test_arguments_reach_the_command_in_any_order(command):
    seen = {}
    command(lambda args: seen.update(vars(args)) or 7)
    assert cli.main(["try", "--steps", "3", "a=1", "--seed", "4", "b=-2"]) == 7
    assert seen == {"steps": 3, "seed": 4, "overrides": ["a=1", "b=-2"]}


def test_unknown_options_suggest_the_nearest(capsys, command):
    command(lambda args: 0)
    assert cli.main(["try", "--stpes=3"]) == 2
    assert err(capsys) == (
        "error: unknown option --stpes (did you mean '--steps'?); see `laneformer try --help`\n"
    )
    assert cli.main(["try", "--step", "3"]) == 2  # an abbreviation
    assert "unknown option --step (did you mean '--steps'?)" in err(capsys)
    assert cli.main(["try", "--steps", "x"]) == 2
    assert "argument --steps: invalid int value: 'x'; see" in err(capsys)


def test_nested_commands(capsys, command):
    seen = {}
    command(lambda args: seen.update(vars(args)) or 0, nested=True)
    assert cli.main(["try", "train", "--vocab-size", "9"]) == 0
    assert seen == {"what": "train", "vocab_size": 9}
    assert cli.main(["try", "train", "--vocab-sizes", "9"]) == 2
    assert err(capsys) == (
        "error: unknown option --vocab-sizes (did you mean '--vocab-size'?); "
        "see `laneformer try train --help`\n"
    )
    assert cli.main(["try", "trian"]) == 2
    assert "(did you mean 'train'?); see `laneformer try --help`" in err(capsys)
    assert cli.main(["try", "train", "more"]) == 2
    assert "unrecognized arguments: more" in err(capsys)


def test_user_errors_are_one_line_and_exit_2(capsys, command):
    command(raises(UserError("run.yaml: steps\nmust be positive")))
    assert cli.main(["try"]) == 2
    assert err(capsys) == "error: run.yaml: steps must be positive\n"


def test_unreadable_files_are_one_line_and_exit_2(capsys, command, tmp_path):
    command(lambda args: open(tmp_path / "no").close())
    assert cli.main(["try"]) == 2
    assert err(capsys) == f"error: {tmp_path / 'no'}: No such file or directory\n"


def test_debug_shows_the_traceback(monkeypatch, command):
    command(raises(UserError("bad")))
    monkeypatch.setenv("LANEFORMER_DEBUG", "1")
    with pytest.raises(UserError, match="bad"):
        cli.main(["try"])


def test_other_errors_keep_their_traceback(command):
    command(raises(ValueError("a bug")))
    with pytest.raises(ValueError, match="a bug"):
        cli.main(["try"])


def test_user_warnings_are_one_line_and_others_keep_their_place():
    done = python(
        """
import sys, types, warnings
from laneformer_jax import cli

def run(args):
    warnings.warn("step 3 is\\ndamaged")
    warnings.warn("odd", RuntimeWarning)
    return 0

module = types.SimpleNamespace(__doc__="", add_arguments=lambda parser: None, run=run)
sys.modules["try_module"] = module
cli.COMMANDS["try"] = cli.Command("try_module", "")
plain = warnings.formatwarning
assert cli.main(["try"]) == 0
assert warnings.formatwarning is plain
"""
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines() == [
        "warning: step 3 is damaged",
        "<string>:7: RuntimeWarning: odd",
    ]


def test_interrupt_exits_130(capsys, command):
    command(raises(KeyboardInterrupt()))
    assert cli.main(["try"]) == 130
    assert err(capsys) == "interrupted\n"


def test_a_reader_that_goes_away_is_no_error():
    done = subprocess.run(
        f"{sys.executable} -m laneformer_jax info --json; echo $? >&2",
        shell=True,
        cwd=ROOT,
        stdout=_closed_pipe(),
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        preexec_fn=lambda: signal.signal(signal.SIGPIPE, signal.SIG_IGN),
    )
    assert done.stderr == "141\n"


def _closed_pipe():
    read, write = os.pipe()
    os.close(read)
    return os.fdopen(write, "w")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(28, "No space left on device"), "No space left on device"),
        (
            ValueError(
                'RESOURCE_EXHAUSTED: Error writing local file "/x/y": Failed to write 9 bytes: '
                "No space left on device [os_error_code='28']"
            ),
            "/x/y: No space left on device",
        ),
    ],
)
def test_a_full_disk_is_one_line(monkeypatch, capsys, error, said):
    def dispatch(argv):
        raise error

    monkeypatch.setattr(cli, "_dispatch", dispatch)
    assert cli.main(["import"]) == cli.EXIT_USER_ERROR
    assert capsys.readouterr().err.startswith(f"error: {said}")
