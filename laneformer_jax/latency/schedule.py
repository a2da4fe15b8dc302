"""One token as tasks: what waits for what under each scheme, on one of the devices (all do the same).

Schemes:
    delayed      as the config says: δ layers late, the first δ layers waited for or apart
    tensor       ordinary tensor parallelism: every module's sum is waited for
    ladder       module j runs without module j−1's output, whose sum is in flight (Ladder Residual)
    independent  lanes that never hear each other: the floor of what delay can reach
    pipeline     layers divided among devices; at batch one they work one after another
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from laneformer_jax.config import MLP, LaneformerConfig
from laneformer_jax.errors import UserError
from laneformer_jax.hardware import MOST_DEVICES
from laneformer_jax.latency.assumptions import Engine
from laneformer_jax.latency.timeline import Timeline
from laneformer_jax.latency.workload import Module, Phase, Workload

SCHEMES = ("delayed", "tensor", "ladder", "independent", "pipeline")
KINDS = ("weights", "kv", "restart", "compute", "launch", "barrier", "collective", "sampling")
MEMORY, LINKS, UNITS = "memory", "links", "units"
_CANDIDATE_BYTES = 8.0  # best logit and its id


@dataclass
class Schedule:
    """Adds whole tokens to a timeline."""

    workload: Workload
    engine: Engine
    devices: int
    scheme: str
    timeline: Timeline = field(default_factory=Timeline)
    ready: tuple[int, ...] = ()  # what the next phase waits for
    last_read: int = -1
    # Late sums with the tasks that would have been waited for without them.
    late: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        check_split(self.workload.config, self.devices, self.scheme)

    @property
    def servers(self) -> dict[str, int]:
        return {MEMORY: 1, LINKS: 1, UNITS: 1}

    def add_token(self) -> int:
        """Append one token; gives the number of its last task."""
        outside = self.engine.kernels_outside / 2
        if self.scheme == "pipeline":
            self._pipeline()
        else:
            self._phase(self.workload.embedding, outside, barrier=False)
            self._modules()
            lanes_differ = self.scheme in ("delayed", "independent")
            if self._spread and lanes_differ and self.workload.last_sum:
                self._wait(self._sum(self.workload.sum_bytes, self.devices, "last sum"))
            self._phase(self.workload.head, outside)
            if self._spread:
                size = self.workload.logits_sum_bytes or _CANDIDATE_BYTES
                self._wait(self._sum(size, self.devices, "logits"))
        sampled = self.timeline.add("sampling", self.engine.sampling, self.ready, label="sampling")
        self.ready = (sampled,)
        return sampled

    @property
    def _spread(self) -> bool:
        return self.devices > 1

    def _modules(self) -> None:
        arrivals: dict[int, int] = {}  # module number -> the sum of its outputs
        modules = self.workload.modules
        for number, module in enumerate(modules):
            for phase in module.phases:
                self._phase(phase, self._launches)
            if not self._spread:
                continue
            waited, queued = self._exchange(module)
            lanes = self.workload.config.num_lanes
            group = self.devices // lanes if self.scheme in ("delayed", "independent") else 1
            if group > 1 and not waited:
                label = f"{module.layer}.{module.name} within lane"
                self._wait(self._sum(self.workload.sum_bytes, group, label))
            if waited or queued:
                label = f"{module.layer}.{module.name}"
                arrivals[number] = self._sum(self.workload.sum_bytes, self.devices, label)
            due = number if waited else number - self._modules_late
            if due in arrivals and (waited or not self._early(module)):
                if not waited:
                    self.late.append((arrivals[due], self.ready))
                self._wait(arrivals[due])
        if self.scheme == "ladder" and self._spread:
            self._wait(arrivals[len(modules) - 1])

    @cached_property
    def _launches(self) -> float:
        """Kernels of one phase."""
        phases = sum(len(module.phases) for module in self.workload.modules)
        return self.engine.kernels_per_layer * self.workload.config.num_hidden_layers / phases

    @property
    def _modules_late(self) -> int:
        """Modules between the one whose sum starts and the one at whose end it is needed."""
        return 1 if self.scheme == "ladder" else 2 * self.workload.config.broadcast_delay

    def _exchange(self, module: Module) -> tuple[bool, bool]:
        """Whether the module's sum is waited for, and whether one arrives late."""
        if self.scheme == "delayed":
            config = self.workload.config
            return config.sums_now(module.layer), config.queues(module.layer, module.name)
        return self.scheme == "tensor", self.scheme == "ladder"

    def _early(self, module: Module) -> bool:
        return self.scheme == "delayed" and module.layer < self.workload.config.broadcast_delay

    def _phase(
        self, phase: Phase, launches: float, barrier: bool = True, devices: int | None = None
    ) -> None:
        """Launch, read, compute; then every unit of the device waits for the others."""
        engine, line = self.engine, self.timeline
        devices = self.devices if devices is None else devices
        before = self.ready
        if engine.launch and launches:
            launched = line.add("launch", launches * engine.launch, before, label=phase.name)
            before = (launched,)
        done = list(before)
        total = phase.bytes_per_device(devices)
        ahead = min(total - phase.kv_bytes / devices, engine.prefetch_bytes)
        if self.last_read < 0:
            ahead = 0.0
        if ahead > 0:
            # The stream flows on while the device waits; the phase itself still starts after that.
            done.append(self._read("weights", ahead, (self.last_read,), phase.name))
        if total > ahead:
            rest = line.add("restart", engine.restart, tuple(done), MEMORY, label=phase.name)
            kind = "kv" if phase.kv_bytes else "weights"
            done.append(self._read(kind, total - ahead, (rest,), phase.name))
        if total > 0:
            self.last_read = done[-1]
        if phase.flops:
            seconds = phase.flops / devices / engine.flops
            done.append(line.add("compute", seconds, before, UNITS, label=phase.name))
        if barrier:
            done = [line.add("barrier", engine.barrier, tuple(done), label=phase.name)]
        self.ready = tuple(done)

    def _read(self, kind: str, size: float, after: tuple[int, ...], label: str) -> int:
        return self.timeline.add(kind, size / self.engine.bandwidth, after, MEMORY, label=label)

    def _sum(self, size: float, devices: int, label: str) -> int:
        """Start a sum across `devices`: each sends its vector to every peer."""
        wire = (devices - 1) * size / self.engine.link_bandwidth
        seconds = self.engine.collective + wire
        hold = seconds if self.engine.in_order else wire
        return self.timeline.add("collective", seconds, self.ready, LINKS, hold, label)

    def _wait(self, task: int) -> None:
        self.ready = (*self.ready, task)

    def _pipeline(self) -> None:
        """Stage after stage; each device reads its layers whole, alone."""
        layers = self.workload.config.num_hidden_layers
        outside = self.engine.kernels_outside / 2
        self._phase(self.workload.embedding, outside, barrier=False)
        stage = 0
        for module in self.workload.modules:
            for phase in module.phases:
                self._phase(phase, self._launches, devices=1)
            done = (module.layer + 1) * self.devices // layers
            if module.name == MLP and done > stage and self._spread:
                stage = done
                # To the next stage, or after the head back to the first with the token.
                self._wait(self._sum(self.workload.sum_bytes, 2, f"after layer {module.layer}"))
        self._phase(self.workload.head, outside, devices=1)


def check_split(config: LaneformerConfig, devices: int, scheme: str) -> None:
    """Raise UserError unless lanes and devices divide evenly."""
    lanes = config.num_lanes
    if scheme in ("delayed", "independent") and lanes % devices and devices % lanes:
        allowed = [n for n in range(1, MOST_DEVICES + 1) if lanes % n == 0 or n % lanes == 0]
        near = min(allowed, key=lambda n: abs(n - devices))
        raise UserError(
            f"hardware: {lanes} lanes do not spread evenly over {devices} devices; the nearest "
            f"number that fits is {near}"
        )
