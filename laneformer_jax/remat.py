"""What the forward pass keeps for the backward pass, and what is computed again.

With L lanes of a device, the residual streams [L,B,S,D] are L times a dense model's, so they decide.
Each policy but `none` keeps two of them per layer, the inputs of its two modules; sums across lanes lie
between modules and are never made again.
"""

from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
from jax.ad_checkpoint import checkpoint_name

from laneformer_jax.attention_chunked import LOG_SUM, OUTPUT
from laneformer_jax.errors import UserError, nearest

# none: keep everything. layer: keep modules' inputs. attention: those and what attention gave, [B,S,H·d]
# over all lanes, so that only linears are computed again (chunked and cuDNN attention; the plain one
# needs its weights again). offload: inputs wait in host memory.
Remat = Literal["none", "layer", "attention", "offload"]
STREAM = "lane_streams"
_HOST = "pinned_host"


def check_remat(remat: str) -> None:
    """Raises UserError for an unknown policy, or one that the devices cannot do."""
    policies = get_args(Remat)
    if remat not in policies:
        raise UserError(
            f"remat: {remat!r} is not one of {', '.join(policies)}{nearest(str(remat), policies)}"
        )
    if remat == "offload" and jax.default_backend() == "cpu":
        raise UserError("remat: offload needs devices with memory of their own; allowed: layer")


def rematerialised(f: Callable[..., Any], remat: Remat) -> Callable[..., Any]:
    """`f` whose insides the backward pass computes again; its first array argument after the weights
    is the residual streams."""
    if remat == "none":
        return f
    policies = jax.checkpoint_policies
    if remat == "offload":

        def named(weights: Any, x_LBSD: jax.Array, *rest: Any) -> Any:
            return f(weights, checkpoint_name(x_LBSD, STREAM), *rest)

        policy = policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=[STREAM],
            offload_src="device",
            offload_dst=_HOST,
        )
        return jax.checkpoint(named, policy=policy)
    kept = (OUTPUT, LOG_SUM) if remat == "attention" else ()
    return jax.checkpoint(f, policy=policies.save_only_these_names(*kept))
