"""Write what EvalPlus 0.3.1 says about the mutants, for test_mutants.py.

Run where EvalPlus is installed, with its native data and ours:
  HUMANEVAL_OVERRIDE_PATH=HumanEvalPlus.jsonl.gz MBPP_OVERRIDE_PATH=MbppPlus.jsonl.gz \
  python record_evalplus.py OUT.json
"""

import json
import multiprocessing
import pathlib
import sys

from evalplus.data import get_human_eval_plus, get_mbpp_plus
from evalplus.eval import untrusted_check
from evalplus.eval._special_oracle import MBPP_OUTPUT_NOT_NONE_TASKS
from evalplus.gen.util import trusted_exec

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from mutants import mutants

SECONDS = 50.0  # per input, where EvalPlus gives 4: its limit is not what is compared


def check(dataset, problem, programs):
    """Status of base and plus for each program; one child per task, so that memory is returned."""
    code = problem["prompt"] + problem["canonical_solution"]
    entry, verdicts = problem["entry_point"], [{} for _ in programs]
    for part in ("base", "plus"):
        inputs = problem[f"{part}_input"]
        expected = trusted_exec(
            code, inputs, entry, output_not_none=entry in MBPP_OUTPUT_NOT_NONE_TASKS
        )
        for program, verdict in zip(programs, verdicts, strict=True):
            status, _ = untrusted_check(
                dataset, program, inputs, entry, expected, problem["atol"], [1.0] * len(inputs),
                fast_check=True, min_time_limit=SECONDS, gt_time_limit_factor=1.0,
            )  # fmt: skip
            verdict[part] = status
    return verdicts


def child(queue, *arguments):
    queue.put(check(*arguments))


def main(out):
    out = pathlib.Path(out)
    found = json.loads(out.read_text()) if out.exists() else {}
    for dataset, problems, count in (
        ("humaneval", get_human_eval_plus(), 3),
        ("mbpp", get_mbpp_plus(), 1),
    ):
        for task_id, problem in problems.items():
            if task_id in found:
                continue
            source = problem["canonical_solution"]
            if dataset == "humaneval":
                source = problem["prompt"] + source
            programs = mutants(task_id, source, count)
            queue = multiprocessing.Queue()
            worker = multiprocessing.Process(target=child, args=(queue, dataset, problem, programs))
            worker.start()
            verdicts = queue.get()
            worker.join()
            found[task_id] = [{"program": p, **v} for p, v in zip(programs, verdicts, strict=True)]
            out.write_text(json.dumps(found))
            print(task_id, verdicts, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
