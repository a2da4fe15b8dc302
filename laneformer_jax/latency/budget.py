"""The simulated token read out: tokens per second, where the time goes, and which term binds."""

from __future__ import annotations

from dataclasses import dataclass

from laneformer_jax.errors import UserError, nearest
from laneformer_jax.hardware import Node
from laneformer_jax.latency.assumptions import Engine, engine_for
from laneformer_jax.latency.schedule import KINDS, SCHEMES, Schedule
from laneformer_jax.latency.timeline import Events
from laneformer_jax.latency.workload import Workload

_TOKENS = 3  # prefetch and in-order links couple neighbours; from the third on nothing changes


@dataclass(frozen=True)
class Term:
    """One kind of work within a token, on one device.

    `seconds` is all of it, `exposed` what stands on the critical path; the rest is hidden behind
    something else. `count` is how many tasks it is.
    """

    count: int
    seconds: float
    exposed: float

    @property
    def hidden(self) -> float:
        return max(0.0, self.seconds - self.exposed)


@dataclass(frozen=True)
class Budget:
    """One decoded token in the steady state of batch one; bytes are of one device."""

    scheme: str
    seconds: float
    terms: dict[str, Term]
    weight_bytes: float
    kv_bytes: float
    collective_bytes: float
    exposed_collectives: int
    bytes_bound: float  # seconds: bytes over bandwidth
    slack: float | None  # seconds by which the tightest late sum is early; negative: waited for
    events: Events

    @property
    def tokens_per_second(self) -> float:
        return 1 / self.seconds

    @property
    def utilisation(self) -> float:
        """Of the bandwidth that the engine's stream reaches: bytes bound over time."""
        return self.bytes_bound / self.seconds

    @property
    def binding(self) -> str:
        """The kind with most time on the critical path."""
        return max(self.terms, key=lambda kind: self.terms[kind].exposed)


def simulate(
    workload: Workload, node: Node, engine: Engine | None = None, scheme: str = "delayed"
) -> Budget:
    """Simulate decoding at batch one.

    Args:
        workload: from `workload.from_config` or `workload.mixture_of_experts`.
        node: the devices that share it.
        engine: what events cost; None for the persistent engine's assumptions.
        scheme: one of `schedule.SCHEMES`; a config with `ladder_residual` makes `ladder` of `delayed`.

    Raises:
        UserError: an unknown scheme, or lanes that do not spread over the devices.
    """
    if scheme not in SCHEMES:
        raise UserError(
            f"scheme: {scheme!r} is unknown; one of {', '.join(SCHEMES)}{nearest(scheme, SCHEMES)}"
        )
    if scheme == "delayed" and workload.config.ladder_residual:
        scheme = "ladder"
    engine = engine_for(node.device) if engine is None else engine
    schedule = Schedule(workload, engine, node.count, scheme)
    ends = [schedule.add_token() for _ in range(_TOKENS)]
    events = schedule.timeline.run(schedule.servers)
    first, last = ends[-2], ends[-1]
    since = events.end[first]
    tasks = range(first + 1, last + 1)
    exposed = dict.fromkeys(KINDS, 0.0)
    waited = 0
    for number, seconds in events.path(last, since):
        exposed[events.tasks[number].kind] += seconds
        waited += events.tasks[number].kind == "collective" and seconds > 0
    terms = {}
    for kind in KINDS:
        own = [
            events.tasks[number].seconds for number in tasks if events.tasks[number].kind == kind
        ]
        terms[kind] = Term(len(own), sum(own), exposed[kind])
    read = 1 if scheme == "pipeline" else node.count
    total = workload.bytes_per_device(read)
    kv = workload.kv_bytes / read
    wire = sum(
        (events.tasks[number].seconds - engine.collective) * engine.link_bandwidth
        for number in tasks
        if events.tasks[number].kind == "collective"
    )
    late = [(arrived, others) for arrived, others in schedule.late if arrived > first]
    return Budget(
        scheme=scheme,
        seconds=events.end[last] - since,
        terms=terms,
        weight_bytes=total - kv,
        kv_bytes=kv,
        collective_bytes=wire,
        exposed_collectives=waited,
        bytes_bound=total / engine.bandwidth,
        slack=min(
            (max(events.end[t] for t in others) - events.end[arrived] for arrived, others in late),
            default=None,
        ),
        events=events,
    )
