"""The one place that looks at JAX's version (supported: 0.10.2 up to, not including, 0.13)."""

from typing import Any

import jax

JAX_VERSION: tuple[int, ...] = tuple(int(p) for p in jax.__version__.split(".")[:3])


# For programs in which delayed sums over GPUs are to be under way while kernels run. Left alone, XLA joins
# the sums of neighbouring layers, which costs copies; makes each a fusion, which its scheduler takes for work
# like any other and starts where it is needed; and lets one be under way at a time.
DELAYED_SUMS: dict[str, str | int] = {
    "xla_gpu_all_reduce_combine_threshold_bytes": 1,
    "xla_disable_hlo_passes": "collective-fusion",
    "xla_gpu_experimental_parallel_collective_overlap_limit": 4,
}

# For training on CPUs: products by oneDNN where jaxlib has it (0.12), by Eigen elsewhere. YNNPACK, XLA's
# choice, takes longer over the shapes of lanes; it is left the reductions, where XLA's own code is ten times
# slower.
CPU_PRODUCTS: dict[str, str | bool] = {
    "xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_REDUCE",
    "xla_cpu_use_onednn": True,
    "xla_cpu_experimental_onednn_custom_call": True,
}


def coordination_client() -> Any:
    """The client of the service that joins the processes of `jax.distributed`; JAX exports none."""
    from jax._src import distributed

    return distributed.global_state.client
