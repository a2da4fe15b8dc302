"""`laneformer generate`: every source of a prompt, every way to tell the answer."""

import gc
import io
import json
import os
import pty
import re
import sys
import threading

import jax
import pytest

from decode import cli, options, terminal
from decode.request import Sampling
from laneformer_jax import compile_cache
from laneformer_jax.cli import build, main

PROMPT = "def f("
OPTIONS = ("--max-new-tokens", "8", "--burst", "4")  # as the other tests, which saves compiling


@pytest.fixture(autouse=True)
def cache_settings(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    names = [
        name for name in dir(jax.config) if "compilation_cache" in name or "persistent" in name
    ]
    before = {name: getattr(jax.config, name) for name in names}
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.fixture
def generate(checkpoint, capsys, monkeypatch):
    def run(*args, stdin=b""):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        code = main(["generate", str(checkpoint), *OPTIONS, *map(str, args)])
        out = capsys.readouterr()
        return code, out.out, out.err

    return run


@pytest.mark.smoke
def test_plain_text_where_there_is_no_terminal(generate, expected):
    assert generate("--prompt", PROMPT) == (0, expected(PROMPT, 8) + "\n", "")


def test_a_prompt_from_a_file_or_standard_input(generate, expected, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_bytes(PROMPT.encode())
    assert generate("--file", file)[1] == expected(PROMPT, 8) + "\n"
    assert generate(stdin=PROMPT.encode())[1] == expected(PROMPT, 8) + "\n"


def test_chat_messages(generate, expected, tmp_path):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi 😀"}]
    right = expected(messages, 8) + "\n"
    assert generate("--prompt", "Hi 😀", "--chat", "--system", "Be brief.")[1] == right
    assert generate("--messages", "-", stdin=json.dumps(messages).encode())[1] == right
    file = tmp_path / "messages.json"
    file.write_text(json.dumps({"model": "x", "messages": messages}))
    assert generate("--messages", file)[1] == right


def test_json_holds_all_of_it(generate, expected, loaded):
    args = ("--json", "--n", 2, "--logprobs", 2)
    code, out, err = generate("--prompt", PROMPT, *args)
    record = json.loads(out)
    assert (code, err, out.count("\n")) == (0, "", 1)
    assert record["prompt_tokens"] == len(loaded.prompt_ids(PROMPT))
    assert len(record["samples"]) == 2
    for sample in record["samples"]:
        assert sample["text"] == expected(PROMPT, 8)
        assert loaded.tokenizer.decode(sample["tokens"]) == sample["text"]
        assert sample["finish_reason"] == "length"
        assert [entry["id"] for entry in sample["logprobs"]] == sample["tokens"]
        for entry in sample["logprobs"]:
            assert entry["top"][0]["id"] == entry["id"]
            assert entry["logprob"] == entry["top"][0]["logprob"] <= 0
    assert record["time_to_first_token"] > 0
    assert record["seconds"] >= record["time_to_first_token"]
    assert record["load_seconds"] > 0
    assert record["draft_tokens"] == record["accepted_draft_tokens"] == 0


def test_stop_strings_and_samples(generate, expected):
    whole = expected(PROMPT, 8)
    stop = whole[3:5]
    _, out, _ = generate("--prompt", PROMPT, "--stop", "never said", "--stop", stop, "--n", 2)
    before = whole[: whole.index(stop)]
    assert out == f"{before}\n\n--- 2 of 2\n{before}\n"


def test_sampling_options_are_the_engines():
    parser, _ = build("generate")
    args = "x --temperature 0.5 --top-k 3 --top-p 0.9 --min-p 0.1 --repetition-penalty 1.1"
    args += " --presence-penalty 0.2 --frequency-penalty -0.3 --logit-bias 7=-1 --logit-bias 9=2.5"
    args += " --seed 11 --logprobs 4"
    assert options.sampling(parser.parse_args(args.split())) == Sampling(
        0.5, 3, 0.9, 0.1, 1.1, 0.2, -0.3, {7: -1.0, 9: 2.5}, 11, 4
    )
    assert options.sampling(parser.parse_args(["x"])) == Sampling()


@pytest.mark.parametrize(
    ("args", "stdin", "message"),
    [
        ((), b"", "prompt: is empty"),
        ((), b"\xff", "standard input: not UTF-8 at byte 0"),
        (("--file", "/nonexistent"), b"", "/nonexistent: cannot be read"),
        (("--prompt", ""), b"", "prompt: is empty"),
        (("--prompt", "a" * 5000), b"", "exceeds the context of 64"),
        (("--prompt", "a", "--max-new-tokens", "0"), b"", "max_new_tokens: 0 must be at least 1"),
        (("--prompt", "a", "--max-new-tokens", "999"), b"", "exceeds the context of 64"),
        (("--prompt", "a", "--temperature", "-1"), b"", "temperature: -1.0"),
        (("--prompt", "a", "--stop", ""), b"", "stop: a stop string is empty"),
        (("--prompt", "a", "--logit-bias", "x"), b"", "--logit-bias: 'x' must be ID=NUMBER"),
        (("--prompt", "a", "--logit-bias", "999=1"), b"", "logit_bias: 999"),
        (("--prompt", "a", "--logprobs", "2"), b"", "--logprobs: needs --json"),
        (("--prompt", "a", "--system", "b"), b"", "--system: needs --chat"),
        (("--prompt", "a", "--lanes", "3"), b"", "lane"),
        (("--prompt", "a", "--context", "500"), b"", "context: 500"),
        (("--prompt", "a", "--burst", "0"), b"", "burst: 0"),
        (("--messages", "-"), b"{", "standard input: not valid JSON"),
        (("--messages", "-"), b'"hi"', "must hold a JSON array of messages"),
        (("--messages", "-"), b"[]", "standard input: holds no messages"),
        (("--messages", "-"), b"[1]", "must hold a JSON array of messages"),
        (("--messages", "-"), b'[{"role": "cook", "content": "a"}]', "role must be"),
        (("--messages", "-", "--chat"), b"[]", "leave out --chat"),
        (("--messages", "-"), b'{"messages": 5}', "must hold a JSON array of messages"),
        (("--messages", "-"), b"[" * 100_000, "standard input: not valid JSON (nested too deeply)"),
        (("--messages", "-"), b'[{"role": "user", "content": "\\ud800"}]', "lone surrogate U+D800"),
        (("--messages", "-"), b'[{"role": "user", "content": 5}]', "content"),
        (("--messages", "/nonexistent"), b"", "/nonexistent: cannot be read"),
        # What Python makes of an argument that is not UTF-8.
        (("--prompt", "\udcff"), b"", "lone surrogate U+DCFF"),
        (("--prompt", "a", "--stop", "\udcff"), b"", "holds a lone surrogate"),
        (("--prompt", "a", "--stop", "b" * 2000), b"", "stop: a string of 2000 characters"),
        (("--prompt", "a", *("--stop", "b") * 17), b"", "stop: 17 strings; at most 16"),
        (("--prompt", "a", "--stop-token", "400"), b"", "stop_token_ids: 400"),
        (("--prompt", "a", "--stop-token", "-1"), b"", "stop_token_ids: -1"),
        (("--prompt", "a", "--n", "0"), b"", "n: 0"),
        (("--prompt", "a", "--n", 10**30), b"", "n: 1"),
        (("--prompt", "a", "--top-k", "-1"), b"", "top_k: -1"),
        (("--prompt", "a", "--temperature", "nan"), b"", "temperature: nan"),
        (("--prompt", "a", "--temperature", "hot"), b"", "--temperature"),
        (("--prompt", "a", "--top-p", "inf"), b"", "top_p: inf"),
        (("--prompt", "a", "--seed", 10**30), b"", "seed: 1"),
        (("--prompt", "a", "--seed", "-1"), b"", "seed: -1"),
        (("--prompt", "a", "--logit-bias", "5=nan"), b"", "logit_bias[5]: nan"),
        (("--prompt", "a", "--logit-bias", "5=1e9"), b"", "logit_bias[5]: 1000000000.0"),
        (("--prompt", "a", "--max-new-tokens", 10**30), b"", "exceeds the context of 64"),
        (("--prompt", "a", "--json", "--logprobs", "21"), b"", "logprobs: 21"),
        (("--prompt", "a", "--lanes", "0"), b"", "lane"),
        (("--prompt", "a", "--context", "0"), b"", "context: 0"),
        (("--prompt", "a", "--file", "b"), b"", "--file"),
        (("--stpo", "a"), b"", "did you mean '--stop'"),
    ],
)
def test_bad_input_is_one_line(generate, args, stdin, message):
    code, out, err = generate(*args, stdin=stdin)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err


def test_overflow_may_be_cut(generate):
    args = (
        "--prompt",
        "a",
        "--max-new-tokens",
        999,
        "--overflow",
        "cut",
        "--json",
    )
    record = json.loads(generate(*args, "--ignore-eos")[1])
    assert record["prompt_tokens"] + len(record["samples"][0]["tokens"]) == 64


# On a terminal -------------------------------------------------------------------------------


def test_a_terminal_gets_a_line_of_figures_below_the_text(checkpoint, expected, monkeypatch):
    leader, follower = pty.openpty()
    terminal_out = os.fdopen(follower, "w")
    written = bytearray()

    def read():
        try:
            while data := os.read(leader, 4096):
                written.extend(data)
        except OSError:  # the other end is closed
            pass

    reader = threading.Thread(target=read)
    reader.start()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", terminal_out)
    monkeypatch.setattr(os, "get_terminal_size", lambda _: os.terminal_size((60, 20)))
    code = main(["generate", str(checkpoint), "--prompt", PROMPT, *OPTIONS])
    monkeypatch.undo()
    terminal_out.close()
    reader.join(10)
    os.close(leader)
    assert code == 0
    text = written.decode()
    assert "\x1b[1;19r" in text  # the last line does not scroll
    assert "tok/s" in text
    assert text.index("\x1b[1;19r") < text.rindex("\x1b[r")  # and does again at the end
    # Without what is drawn between saving and restoring the cursor, the text is left.
    plain = re.sub(r"\x1b7.*?\x1b8", "", text, flags=re.DOTALL)
    assert plain.replace("\x1b[1A", "").replace("\r\n", "\n").strip("\n") == terminal.printable(
        expected(PROMPT, 8)
    ).strip("\n")


def test_a_model_cannot_drive_the_terminal():
    text = "\x1b]0;title\x07\x1b[2Ja\tb\nc\r\x7f\x9b"
    assert terminal.printable(text) == "␛]0;title␇␛[2Ja\tb\nc␍␡\ufffd"


def test_compiled_programs_are_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    jax.config.update("jax_compilation_cache_dir", None)
    compile_cache.enable()
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "laneformer" / "jax")
    jax.config.update("jax_compilation_cache_dir", "/elsewhere")
    compile_cache.enable()
    assert jax.config.jax_compilation_cache_dir == "/elsewhere"


def test_the_collector_rests_only_until_the_first_token(checkpoint, monkeypatch, capsys):
    on = []
    add, load = cli._Told.add, options.load
    monkeypatch.setattr(options, "load", lambda args: on.append(gc.isenabled()) or load(args))
    monkeypatch.setattr(cli._Told, "add", lambda *args: on.append(gc.isenabled()) or add(*args))
    assert main(["generate", str(checkpoint), "--prompt", PROMPT, *OPTIONS]) == 0
    assert on[:2] == [False, True]
    assert main(["generate", str(checkpoint / "none"), "--prompt", "a"]) == 2
    assert gc.isenabled()
