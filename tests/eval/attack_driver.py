"""Judge hostile programs and print what became of them; run by test_attacks.py, as any user.

Reads JSON from standard input: `bubblewrap`, `expected`, `programs` (name to source). Prints JSON:
`level` and `verdicts` (name to kind, reason, passed).
"""

import json
import marshal
import sys

from eval.grading import Grader
from eval.sandbox.probe import open_sandbox
from eval.suites import Table, Task


def main() -> None:
    order = json.load(sys.stdin)
    sandbox = open_sandbox(bubblewrap=order["bubblewrap"], memory=768 << 20)
    table = Table("f", [[1], [2]], [marshal.dumps(x, 2) for x in order["expected"]], ("equal", 0))
    task = Task("Attack/0", "", "f", "def f(x): return x", lambda: table, ("plus",))
    with Grader(sandbox, min_seconds=4.0) as grader:
        programs = ((name, task, source) for name, source in order["programs"].items())
        verdicts = {
            name: {"kind": v.kind, "reason": v.reason, "got": v.got, "passed": v.passed["plus"]}
            for name, v in grader.grade_many(programs, workers=2)
        }
    json.dump({"level": sandbox.level, "verdicts": verdicts}, sys.stdout)


if __name__ == "__main__":
    main()
