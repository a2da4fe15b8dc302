"""How long a decoded token takes at batch one: a simulator from model shape and hardware table to tok/s.

Needs no JAX. `workload` counts bytes, `assumptions` says what each event costs, `schedule` lays one
token out as tasks, `timeline` runs them, `budget` reads the result.
"""

from laneformer_jax.latency.assumptions import Engine, engine_for
from laneformer_jax.latency.budget import Budget, simulate
from laneformer_jax.latency.workload import Workload, from_config, mixture_of_experts

__all__ = [
    "Budget",
    "Engine",
    "Workload",
    "engine_for",
    "from_config",
    "mixture_of_experts",
    "simulate",
]
