"""Names of the implementations of the decode step. Imports nothing: command lines list them."""

# By how much one launch does: an operation of a layer, a layer, or all layers.
LAUNCHES = ("fused", "layer", "token")
# On any device, one program after another; to test the kernels and nothing else.
INTERPRETED = tuple(f"interpret-{name}" for name in LAUNCHES)
KERNELS = ("auto", "xla", *LAUNCHES, *INTERPRETED)
