"""One evaluation from request to report; every step continues what an earlier run left."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from eval import records, results
from eval.extract import extract
from eval.grading import MIN_SECONDS, Grader
from eval.models import CheckpointModel, EndpointModel, Model, Sampling
from eval.suites import SUITES, Suite, Task, load_suite
from laneformer_jax.checkpoint.workplace import claim
from laneformer_jax.errors import UserError, nearest
from laneformer_jax.files import atomic_file
from laneformer_jax.progress import progress

PPL = "ppl"
Programs = dict[tuple[str, int], tuple[str, str | None]]  # (task, sample) -> program, answer


@dataclass(frozen=True)
class Request:
    """What to evaluate and how. Exactly one of `checkpoint`, `endpoint` and `samples` is given.

    Args:
        suites: name to local data, or None for the Hub; `ppl` needs data.
        out: folder of all results.
        extract: whether `samples` holds answers that programs are to be taken from.
        chat: ask through a chat template; else continue the prompt.
        limit: first tasks (or documents) only.
        unsafe: run programs even where isolation is too weak.
        context, stride: windows of `ppl`, in tokens.
        min_seconds: wall time every program gets, at least.
    """

    suites: dict[str, str | None]
    out: Path
    checkpoint: str | None = None
    endpoint: str | None = None
    samples: Path | None = None
    extract: bool = False
    model: str = "default"
    chat: bool = True
    n: int = 1
    temperature: float = 0.0
    max_new_tokens: int = 768
    seed: int = 0
    dtype: str | None = None
    limit: int | None = None
    workers: int = 2
    unsafe: bool = False
    context: int | None = None
    stride: int | None = None
    min_seconds: float = field(default=MIN_SECONDS)

    @property
    def sampling(self) -> Sampling:
        """The part that concerns drawing answers."""
        return Sampling(self.n, self.temperature, self.max_new_tokens, self.seed)


def parse_suite(text: str, data: str | None) -> tuple[str, str | None]:
    """`NAME[=PATH]` as a name and its data.

    Raises:
        UserError: unknown suite, or `ppl` without data.
    """
    name, _, path = text.partition("=")
    if name not in (*SUITES, PPL):
        allowed = (*SUITES, PPL)
        raise UserError(f"--suite {name!r}{nearest(name, allowed)}: one of {', '.join(allowed)}")
    if name == PPL and not (path or data):
        raise UserError("--suite ppl needs text: --data PATH or --suite ppl=PATH")
    return name, path or data


def evaluate(request: Request) -> dict[str, Any]:
    """Run everything that is not done yet; returns what `results.json` holds.

    Raises:
        UserError: what is asked for cannot be had, or another process evaluates in the same folder.
    """
    settings = _settings(request)
    suites = {
        name: _limited(load_suite(name, data), request.limit)
        for name, data in request.suites.items()
        if name != PPL
    }
    request.out.mkdir(parents=True, exist_ok=True)
    try:
        with claim(request.out):
            return _evaluate(request, settings, suites)
    except BlockingIOError:
        raise UserError(
            f"{request.out}: another evaluation runs in this folder; name another --out"
        ) from None


def _evaluate(
    request: Request, settings: dict[str, Any], suites: dict[str, Suite]
) -> dict[str, Any]:
    _check_settings(request.out / "settings.json", settings)
    model = _model(request, bool(suites))
    found: dict[str, Any] = {"settings": settings, "suites": {}}
    if PPL in request.suites:
        found["perplexity"] = _perplexity(request, model)
    programs = _programs(request, suites, model)
    samples: dict[str, Any] = {}
    found["environment"] = {}
    if suites:
        from eval.sandbox.probe import open_sandbox

        sandbox = open_sandbox(unsafe=request.unsafe)
        found["environment"] = results.environment(
            sandbox.level, request.workers, request.min_seconds
        )
        print(f"isolation: {sandbox.level}", file=sys.stderr)
        with Grader(sandbox, request.min_seconds) as grader:
            for name, suite in suites.items():
                verdicts = _verdicts(request, suite, programs[suite.family], grader)
                found["suites"][name] = results.score(suite, verdicts)
                samples[name] = _by_task(verdicts, programs[suite.family])
        _export(request.out, suites, programs)
    _finish(request, found, suites, samples)
    return found


def _settings(request: Request) -> dict[str, Any]:
    """What a run in the same folder must agree on."""
    kept = asdict(request)
    for name in ("suites", "out", "limit", "workers", "unsafe", "min_seconds", "context", "stride"):
        del kept[name]
    kept["samples"] = None if request.samples is None else _digest(request.samples.read_bytes())
    if request.samples is not None:
        return {"samples": kept["samples"], "extract": request.extract}
    del kept["samples"], kept["extract"]
    return {name: value for name, value in kept.items() if value is not None}


def _check_settings(path: Path, settings: dict[str, Any]) -> None:
    if path.exists():
        old = json.loads(path.read_text(encoding="utf-8"))
        for name in {*old, *settings}:
            if old.get(name) != settings.get(name):
                raise UserError(
                    f"{path.parent}: begun with {name} = {old.get(name)!r}, now"
                    f" {settings.get(name)!r}; name another --out"
                )
        return
    with atomic_file(path) as file:
        json.dump(settings, file, indent=1)


def _limited(suite: Suite, limit: int | None) -> Suite:
    return suite if limit is None else suite.subset([*suite.tasks][:limit])


def _model(request: Request, needed: bool) -> Model | None:
    if request.endpoint is not None:
        return EndpointModel(request.endpoint, request.model, request.chat)
    if request.checkpoint is not None and (needed or PPL in request.suites):
        return CheckpointModel(request.checkpoint, request.chat, request.dtype)
    return None


def _programs(
    request: Request, suites: dict[str, Suite], model: Model | None
) -> dict[str, Programs]:
    """Programs of each family; suites of a family are judged on the same ones."""
    found: dict[str, Programs] = {}
    for family in dict.fromkeys(suite.family for suite in suites.values()):
        # The plus suite's prompts are EvalPlus's; a task of both is asked once.
        members = sorted(
            (s for s in suites.values() if s.family == family), key=lambda s: s.name.endswith("+")
        )
        tasks: dict[str, Task] = {}
        for suite in members:
            tasks.update(suite.tasks)
        if request.samples is not None:
            taken = records.programs(request.samples, tasks)
            found[family] = {
                (task_id, index): (
                    extract(text, tasks[task_id].entry_point) if request.extract else text,
                    text,
                )
                for task_id, index, text in taken
            }
            if not found[family]:
                raise UserError(f"{request.samples}: holds no task of {', '.join(suites)}")
        else:
            assert model is not None
            found[family] = _answered(request, family, tasks, model)
    return found


def _answered(request: Request, family: str, tasks: dict[str, Task], model: Model) -> Programs:
    sampling, found = request.sampling, {}
    with records.Journal(request.out / f"answers-{family}.jsonl", ("task_id", "sample")) as journal:
        todo = [
            (task, index)
            for task in tasks.values()
            for index in range(sampling.n)
            if (task.task_id, index) not in journal.done
        ]
        total = len(tasks) * sampling.n
        with progress(total, f"{family} answers", "answers", start=total - len(todo)) as bar:
            for task, index in todo:
                began = time.monotonic()
                answer = model.answer(task.prompt, family, sampling, index)
                journal.add(
                    {
                        "task_id": task.task_id,
                        "sample": index,
                        "answer": answer.text,
                        "finish_reason": answer.finish_reason,
                        "tokens": answer.tokens,
                        "seconds": round(time.monotonic() - began, 3),
                    }
                )
                bar.advance()
        for task in tasks.values():
            for index in range(sampling.n):
                text = journal.done[task.task_id, index]["answer"]
                found[task.task_id, index] = (extract(text, task.entry_point), text)
    return found


def _verdicts(
    request: Request, suite: Suite, programs: Programs, grader: Grader
) -> list[dict[str, Any]]:
    path = request.out / f"verdicts-{suite.name}.jsonl"
    with records.Journal(path, ("task_id", "sample", "program_sha256")) as journal:
        keys = {
            (task_id, index): (task_id, index, _digest(program.encode("utf-8", "replace")))
            for (task_id, index), (program, _) in programs.items()
            if task_id in suite.tasks
        }

        def todo() -> Iterator[tuple[tuple[str, int], Task, str]]:
            for key, full in keys.items():
                if full not in journal.done:
                    yield key, suite.tasks[key[0]], programs[key][0]

        done = sum(full in journal.done for full in keys.values())
        with progress(len(keys), f"{suite.name} verdicts", "programs", start=done) as bar:
            for key, verdict in grader.grade_many(todo(), request.workers):
                sha = keys[key][2]
                record = {"task_id": key[0], "sample": key[1], "program_sha256": sha}
                journal.add(record | results.plain(verdict))
                bar.advance()
        verdicts = [journal.done[full] for full in keys.values()]
        journal.rewrite(verdicts)
    return verdicts


def _by_task(verdicts: list[dict[str, Any]], programs: Programs) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for verdict in verdicts:
        program, answer = programs[verdict["task_id"], verdict["sample"]]
        shown = {**verdict, "program": program, "answer": answer}
        found.setdefault(verdict["task_id"], []).append(shown)
    return found


def _export(out: Path, suites: dict[str, Suite], programs: dict[str, Programs]) -> None:
    """The programs as EvalPlus reads them."""
    for family in {suite.family for suite in suites.values()}:
        records.write(
            out / f"samples-{family}.jsonl",
            [
                {"task_id": t, "solution": program}
                for (t, _), (program, _) in programs[family].items()
            ],
        )


def _perplexity(request: Request, model: Model | None) -> dict[str, Any]:
    from itertools import islice

    from eval import perplexity as ppl

    if not isinstance(model, CheckpointModel):
        raise UserError("--suite ppl needs a checkpoint: servers and samples give no probabilities")
    data = request.suites[PPL]
    assert data is not None
    texts = islice(ppl.documents(data), request.limit)
    got = ppl.perplexity(model.model, model.tokenizer, texts, request.context, request.stride)
    return {
        "data": data,
        **asdict(got),
        "perplexity": got.perplexity,
        "bits_per_byte": got.bits_per_byte,
        "context": request.context,
        "stride": request.stride,
    }


def _finish(
    request: Request, found: dict[str, Any], suites: dict[str, Suite], samples: dict[str, Any]
) -> None:
    for line in results.table(found["suites"]):
        print(line)
    if "perplexity" in found:
        score = found["perplexity"]
        print(
            f"ppl         {score['perplexity']:.4f} per token, {score['bits_per_byte']:.4f} bits per"
            f" byte, {score['tokens']} tokens, {score['documents']} documents"
        )
    with atomic_file(request.out / "results.json") as file:
        json.dump(found, file, indent=1)
        file.write("\n")
    if suites or "perplexity" in found:
        from eval.report import write_report

        title = request.checkpoint or request.endpoint or str(request.samples)
        page = write_report(request.out / "report", str(title), suites, found, samples)
        print(f"report: {page}")


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
