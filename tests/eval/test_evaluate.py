import http.server
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from eval import prompts, records
from eval.inloop import BackgroundEvaluation
from eval.run import Request, evaluate, parse_suite
from eval.suites import load_suite
from laneformer_jax.checkpoint.workplace import claim
from laneformer_jax.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
F = "```"
JUNK = [
    "", "I'm sorry, I can't.", f"{F}python\nprint('hello'\n{F}", "(" * 2000, f"{F}\n" * 40, "\0\ud83d",
]  # fmt: skip


class Scripted(http.server.BaseHTTPRequestHandler):
    """Answers of an OpenAI-compatible server, chosen by task and sample."""

    suite = None
    calls = None
    delay = 0.0
    failures = 0

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if type(self).failures:
            type(self).failures -= 1
            self.send_error(503)
            return
        time.sleep(self.delay)
        chat = self.path.endswith("/chat/completions")
        asked = body["messages"][0]["content"] if chat else body["prompt"]
        self.calls.append(asked)
        task = next(
            t for t in self.suite.tasks.values()
            if (prompts.question(t.prompt) if chat else prompts.completion(t.prompt)) == asked
        )  # fmt: skip
        text = script(task, body["seed"], chat)
        choice = {"message": {"content": text}} if chat else {"text": text}
        reply = json.dumps({"choices": [choice], "usage": {"completion_tokens": 3}}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, *_):
        pass


def script(task, seed, chat):
    """Sample 0: right for even tasks; sample 1: right for multiples of three; else wrong or junk."""
    number = int(task.task_id.split("/")[1])
    if number % (2, 3)[seed % 2] == 0:
        if not chat:
            return task.canonical[len(task.prompt) :]
        return f"Here you are:\n{F}python\n{task.canonical}\n{F}\nIt works."
    if number % 5 == 0:
        return JUNK[number % len(JUNK)]
    return f"{F}python\ndef {task.entry_point}(*arguments):\n    return 'wrong'\n{F}"


@pytest.fixture
def endpoint(evaldata):
    Scripted.suite, Scripted.calls = load_suite("humaneval+", evaldata), []
    Scripted.delay, Scripted.failures = 0.0, 0
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Scripted)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    server.shutdown()


def request(evaldata, out, **changes):
    return Request(suites={"humaneval+": str(evaldata)}, out=out, **changes)


def test_endpoint_gives_exactly_the_known_score(evaldata, endpoint, tmp_path):
    Scripted.failures = 1  # a busy server is asked again
    got = evaluate(request(evaldata, tmp_path, endpoint=endpoint, n=2, temperature=0.5, limit=14))
    result = got["suites"]["humaneval+"]
    # Even: 0 2 4 6 8 10 12; multiples of three: 0 3 6 9 12. Both: 0 6 12.
    assert result["kinds"]["pass"] == 12
    for part in ("base", "plus"):
        assert result["scores"][part]["pass@1"]["value"] == pytest.approx(12 / 28)
        assert result["scores"][part]["solved"] == {"tasks": 9, "of": 14}
        assert result["pass_at_k"][part] == pytest.approx([12 / 28, 9 / 14])
    assert got["environment"]["isolation"].endswith("landlock+seccomp")
    report = (tmp_path / "report" / "index.html").read_text()
    assert "42.86 %" in report
    assert ">2 × pass</a>" in report
    assert ">1 × pass</a>, <a " in report
    assert (tmp_path / "report" / "pass_at_k.png").read_bytes()[:4] == b"\x89PNG"
    page = (tmp_path / "report" / "tasks" / "humaneval+-HumanEval-1.html").read_text()
    assert "separate_paren_groups" in page
    assert "first failing call" in page
    solutions = records.read(tmp_path / "samples-humaneval.jsonl")
    assert len(solutions) == 28
    assert solutions[0].keys() == {"task_id", "solution"}
    # Its own samples file gives the same score.
    again = evaluate(
        request(evaldata, tmp_path / "b", samples=tmp_path / "samples-humaneval.jsonl", limit=14)
    )
    assert again["suites"]["humaneval+"]["scores"] == result["scores"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["humaneval+", "mbpp+"])
def test_endpoint_over_a_whole_suite(evaldata, endpoint, tmp_path, name):
    """Right answers to the even tasks, wrong code and junk to the odd ones: nothing in between."""
    Scripted.suite = load_suite(name, evaldata)
    got = evaluate(Request(suites={name: str(evaldata)}, out=tmp_path, endpoint=endpoint))
    result, tasks = got["suites"][name], Scripted.suite.tasks
    even = sum(int(task_id.split("/")[1]) % 2 == 0 for task_id in tasks)
    assert result["kinds"]["pass"] == even
    assert result["scores"]["plus"]["pass@1"]["value"] == pytest.approx(even / len(tasks))
    assert result["scores"]["plus"]["solved"] == {"tasks": even, "of": len(tasks)}
    answers = records.read(tmp_path / f"answers-{name.rstrip('+')}.jsonl")
    assert [a["task_id"] for a in answers] == [*tasks]
    assert "\0\ud83d" in [a["answer"] for a in answers]


def test_base_models_continue_the_prompt(evaldata, endpoint, tmp_path):
    got = evaluate(request(evaldata, tmp_path, endpoint=endpoint, chat=False, limit=3))
    assert got["suites"]["humaneval+"]["kinds"]["pass"] == 2


def test_stopped_evaluation_goes_on(evaldata, endpoint, tmp_path):
    """SIGKILL in the middle of answering; the next run asks for the missing answers only."""
    Scripted.delay = 0.15
    command = [
        sys.executable, "-m", "laneformer_jax", "evaluate", "--endpoint", endpoint, "--suite",
        "humaneval+", "--data", str(evaldata), "--out", str(tmp_path), "--limit", "12",
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    answers = tmp_path / "answers-humaneval.jsonl"
    child = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    while not answers.exists() or answers.read_bytes().count(b"\n") < 4:
        time.sleep(0.02)
    child.send_signal(signal.SIGKILL)
    child.wait()
    kept = answers.read_bytes()
    done = kept.count(b"\n")
    with open(answers, "ab") as file:
        file.write(b'{"task_id": "HumanEval/9", "sam')  # a torn line
    time.sleep(0.5)
    asked = len(Scripted.calls)
    assert asked - done <= 1  # at most the task in flight is lost
    assert subprocess.run(command, env=environment, stdout=subprocess.DEVNULL).returncode == 0
    assert len(Scripted.calls) - asked == 12 - done
    assert answers.read_bytes().startswith(kept)
    first = (tmp_path / "results.json").read_bytes()
    verdicts = (tmp_path / "verdicts-humaneval+.jsonl").read_bytes()
    # Nothing is left to do: the same files come out again. Half of the verdicts gone: they return.
    (tmp_path / "verdicts-humaneval+.jsonl").write_bytes(verdicts[: len(verdicts) // 2])
    assert subprocess.run(command, env=environment, stdout=subprocess.DEVNULL).returncode == 0
    assert (tmp_path / "results.json").read_bytes() == first
    assert len(Scripted.calls) - asked == 12 - done
    untimed = re.compile(rb'"seconds": [\d.]+')
    again = (tmp_path / "verdicts-humaneval+.jsonl").read_bytes()
    assert untimed.sub(b"", again) == untimed.sub(b"", verdicts)


@pytest.mark.slow
def test_killed_at_any_moment(evaldata, tmp_path):
    """SIGKILL at ten different moments: what was judged stays, and the files end up the same."""
    tasks = [*load_suite("humaneval+", evaldata).tasks.values()][:8]
    wrong = "def {}(*arguments):\n    return 'wrong'\n"
    lines = [
        {"task_id": task.task_id, "solution": task.canonical if i % 3 else wrong.format(task.entry_point)}
        for task in tasks
        for i in range(10)
    ]  # fmt: skip
    records.write(tmp_path / "samples.jsonl", lines)
    command = [
        sys.executable, "-m", "laneformer_jax", "evaluate", "--samples",
        str(tmp_path / "samples.jsonl"), "--suite", "humaneval+", "--data", str(evaldata),
        "--limit", "8", "--workers", "1", "--out",
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    quiet = {"env": environment, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    subprocess.run([*command, str(tmp_path / "undisturbed")], check=True, **quiet)
    out = tmp_path / "killed"
    verdicts = out / "verdicts-humaneval+.jsonl"
    kept = b""
    for moment in range(1, 11):
        child = subprocess.Popen([*command, str(out)], **quiet)
        deadline = time.monotonic() + 120
        # A few verdicts later, at no particular place in the work of the next.
        while not verdicts.exists() or verdicts.read_bytes().count(b"\n") < 7 * moment:
            assert time.monotonic() < deadline
            time.sleep(0.001 * moment)
        child.kill()
        child.wait()
        now = verdicts.read_bytes()
        assert now.startswith(kept)
        kept = now[: now.rfind(b"\n") + 1]
    assert kept.count(b"\n") < 80
    subprocess.run([*command, str(out)], check=True, **quiet)
    untimed = re.compile(rb'"seconds": [\d.]+')
    for name in (verdicts.name, "results.json", "samples-humaneval.jsonl", "settings.json"):
        pair = [(folder / name).read_bytes() for folder in (out, tmp_path / "undisturbed")]
        assert untimed.sub(b"", pair[0]) == untimed.sub(b"", pair[1]), name


def test_other_settings_need_another_folder(evaldata, endpoint, tmp_path):
    evaluate(request(evaldata, tmp_path, endpoint=endpoint, limit=1))
    with pytest.raises(UserError, match=r"begun with temperature = 0\.0, now 0\.7; name another"):
        evaluate(request(evaldata, tmp_path, endpoint=endpoint, limit=1, temperature=0.7))


def test_one_evaluation_at_a_time_in_a_folder(evaldata, tmp_path):
    path = tmp_path / "samples.jsonl"
    records.write(path, [{"task_id": "HumanEval/0", "solution": "x"}])
    (tmp_path / "out").mkdir()
    with claim(tmp_path / "out"), pytest.raises(UserError, match="another evaluation runs in this"):
        evaluate(request(evaldata, tmp_path / "out", samples=path, limit=1))
    assert [*(tmp_path / "out").iterdir()] == []


def test_samples_file(evaldata, tmp_path):
    suite = load_suite("humaneval+", evaldata)
    tasks = [*suite.tasks.values()][:3]
    lines = [
        {"task_id": tasks[0].task_id, "solution": tasks[0].canonical},
        {"task_id": tasks[1].task_id, "completion": tasks[1].canonical[len(tasks[1].prompt) :]},
        {"task_id": "Other/1", "solution": "x"},
    ]
    path = tmp_path / "samples.jsonl"
    records.write(path, lines)
    got = evaluate(request(evaldata, tmp_path / "out", samples=path, limit=3))
    result = got["suites"]["humaneval+"]
    assert result["tasks_without_program"] == ["HumanEval/2"]
    assert result["scores"]["plus"]["pass@1"]["value"] == pytest.approx(2 / 3)
    path.write_text('{"task_id": "HumanEval/0"}\n')
    with pytest.raises(UserError, match="record 1 has neither `solution` nor `completion`"):
        evaluate(request(evaldata, tmp_path / "other", samples=path))


def test_checkpoint_end_to_end(evaldata, tiny_checkpoint, tmp_path):
    """Random weights: every step runs, and nothing is solved."""
    got = evaluate(
        Request(
            suites={"mbpp+": str(evaldata), "ppl": str(ROOT / "eval" / "passk.py")},
            out=tmp_path,
            checkpoint=str(tiny_checkpoint),
            max_new_tokens=24,
            limit=2,
        )
    )
    result = got["suites"]["mbpp+"]
    assert result["scores"]["base"]["pass@1"]["value"] == 0
    assert result["programs"] == 2
    assert 1 < got["perplexity"]["bits_per_byte"] < 30
    answers = records.read(tmp_path / "answers-mbpp.jsonl")
    assert [a["task_id"] for a in answers] == ["Mbpp/2", "Mbpp/3"]
    assert all(a["tokens"] <= 24 for a in answers)


def test_beside_training(tiny_checkpoint, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("def f(x):\n    return x + 1\n" * 20)
    running = BackgroundEvaluation(tiny_checkpoint, [f"ppl={text}"], tmp_path / "out")
    scores = running.wait(timeout=300)
    assert scores.keys() == {"ppl/perplexity", "ppl/bits_per_byte"}
    assert not running.running()
    bad = BackgroundEvaluation(tmp_path / "none", [f"ppl={text}"], tmp_path / "bad")
    with pytest.raises(RuntimeError, match="error: "):
        bad.wait(timeout=300)


def test_suite_option():
    assert parse_suite("mbpp+=a/b", None) == ("mbpp+", "a/b")
    assert parse_suite("mbpp+", "c") == ("mbpp+", "c")
    with pytest.raises(UserError, match=r"'mbp\+' \(did you mean 'mbpp\+'"):
        parse_suite("mbp+", None)
    with pytest.raises(UserError, match="--suite ppl needs text"):
        parse_suite("ppl", None)


def test_stop_strings():
    assert prompts.cut("a\n```\nb", prompts.stops("mbpp", chat=True)) == "a"
    assert prompts.cut("    x\ndef g", prompts.stops("humaneval", chat=False)) == "    x"
    assert prompts.cut("    x\ndef g", prompts.stops("mbpp", chat=False)) is None


def test_long_answers_are_whole():
    text = "x = 1\n" * 5000
    assert prompts.cut(text + "\nprint(x)", prompts.stops("mbpp", chat=True)) == text


def test_answers_are_the_decode_engines(tiny_checkpoint):
    """The text of `laneformer generate` with the same seed, and none that the tokenizer does not know."""
    from decode.complete import ask, complete
    from decode.engine import Engine
    from decode.request import Sampling as Drawn
    from eval.models import CheckpointModel, Sampling
    from laneformer_jax.checkpoint.load import load_checkpoint

    model = CheckpointModel(str(tiny_checkpoint), chat=False)
    got = model.answer("x", "humaneval", Sampling(1, 0.9, 12, seed=5), 2)
    loaded = load_checkpoint(tiny_checkpoint)
    engine = Engine(loaded.model, vocab_size=loaded.tokenizer.vocab_size)
    asked = ask(loaded, engine, "x\n", 12, sampling=Drawn(0.9, seed=7))
    pieces = [p for step in complete(engine, loaded.tokenizer, asked) for p in step.pieces]
    whole = "x\n" + "".join(piece.text for piece in pieces)
    ends = prompts.stops("humaneval", chat=False)
    cut = prompts.cut(whole, ends, 2)
    assert got.text == (whole if cut is None else cut)
    assert got.tokens <= sum(len(piece.tokens) for piece in pieces)
    if cut is None:
        assert got.finish_reason == pieces[-1].finish


def test_a_fence_in_a_docstring_does_not_end_an_answer(tiny_checkpoint, monkeypatch):
    import numpy as np

    from decode.request import Burst
    from eval.extract import extract
    from eval.models import CheckpointModel, Sampling

    program = f'def f(x):\n    return x + 1\n\nf.__doc__ = """\n{F}\nf(1)\n{F}\n"""\n'
    model = CheckpointModel(str(tiny_checkpoint), chat=True)
    ids = model.tokenizer.encode(f"{program}{F}\nThat is all.\n")
    parts = [np.asarray(ids[i : i + 7], np.int32) for i in range(0, len(ids), 7)]
    bursts = [Burst([part], [None], None, None, None, 0, 0) for part in parts]
    monkeypatch.setattr(model._engine, "stream", lambda _: (burst for burst in bursts))
    got = model.answer("x", "humaneval", Sampling(), 0)
    assert (got.text + "\n", got.finish_reason) == (program, "stop")
    assert extract(got.text, "f") == program
    told = model.tokenizer.encode(program)
    assert (
        abs(got.tokens - len(told)) <= 1
    )  # the last may share its token with what ends the answer


@pytest.mark.parametrize("chat", [False, True])
def test_prompt_has_one_begin_token(tiny_checkpoint, chat):
    from eval.models import CheckpointModel

    model = CheckpointModel(str(tiny_checkpoint), chat)
    ids, start = model.prompt_ids('def f(x):\n    """Add one."""\n')
    bos = model.tokenizer.bos_id
    assert ids[0] == bos
    assert ids.count(bos) == 1
    told = model.tokenizer.decode(ids)
    if chat:
        assert told.endswith(prompts.answer_start())
        assert prompts.question('def f(x):\n    """Add one."""') in told
        assert start == ""
    else:
        assert told == start == 'def f(x):\n    """Add one."""\n'
