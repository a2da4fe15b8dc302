"""A discrete-event simulation of tasks that wait for each other and share resources.

Each resource serves its tasks in the order in which they were added, as a stream or a queue of
stores does, so the event times follow in one pass and grow with every duration: making one task
longer never makes another one earlier.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

_NONE = -1


@dataclass(frozen=True)
class Task:
    """Something that takes `seconds` once the tasks `after` it waits for are done.

    It keeps one server of `resource` busy for the first `hold` of them (a message leaves the wire
    free while it travels). `kind` is what its time is booked under, `label` names it.
    """

    kind: str
    seconds: float
    after: tuple[int, ...] = ()
    resource: str | None = None
    hold: float = 0.0
    label: str = ""


@dataclass
class Timeline:
    """Tasks in program order; `add` gives the number by which later tasks name one."""

    tasks: list[Task] = field(default_factory=list)

    def add(
        self,
        kind: str,
        seconds: float,
        after: tuple[int, ...] = (),
        resource: str | None = None,
        hold: float | None = None,
        label: str = "",
    ) -> int:
        """Append a task; `hold` defaults to `seconds`."""
        hold = seconds if hold is None else hold
        self.tasks.append(Task(kind, seconds, after, resource, hold, label))
        return len(self.tasks) - 1

    def run(self, servers: Mapping[str, int]) -> Events:
        """Start and end of every task, with `servers[resource]` tasks of a resource at a time."""
        start: list[float] = []
        end: list[float] = []
        cause: list[int] = []
        free = {name: [(0.0, _NONE)] * count for name, count in servers.items()}
        for number, task in enumerate(self.tasks):
            begin, why = 0.0, _NONE
            for earlier in task.after:
                if end[earlier] > begin:
                    begin, why = end[earlier], earlier
            if task.resource is not None:
                queue = free[task.resource]
                released, holder = queue.pop(queue.index(min(queue)))
                if released > begin:
                    begin, why = released, holder
                queue.append((begin + task.hold, number))
            start.append(begin)
            end.append(begin + task.seconds)
            cause.append(why)
        return Events(self.tasks, start, end, cause)


@dataclass(frozen=True)
class Events:
    """When each task ran, and which one it had to wait for longest (-1: none)."""

    tasks: list[Task]
    start: list[float]
    end: list[float]
    cause: list[int]

    def path(self, last: int, since: float = 0.0) -> list[tuple[int, float]]:
        """The critical path to the end of task `last`: tasks with the seconds each contributes.

        From `since` on; the seconds add up to `end[last] - since`.
        """
        steps, number, until = [], last, self.end[last]
        while number != _NONE and until > since:
            steps.append((number, until - max(self.start[number], since)))
            number, until = self.cause[number], self.start[number]
        return steps[::-1]


def longest_chain(tasks: list[Task]) -> float:
    """Seconds of the longest chain of dependencies: what unlimited resources would still take."""
    end: list[float] = []
    for task in tasks:
        end.append(task.seconds + max((end[earlier] for earlier in task.after), default=0.0))
    return max(end, default=0.0)
