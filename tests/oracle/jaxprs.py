"""What a traced program holds."""

import math

import jax


def largest(jaxpr):
    """Elements of the largest array anywhere in a jaxpr."""
    sizes = [0]
    for eqn in jaxpr.eqns:
        sizes += [math.prod(v.aval.shape) for v in eqn.outvars]
        for value in jax.tree.leaves(eqn.params, is_leaf=lambda p: hasattr(p, "jaxpr")):
            if hasattr(value, "jaxpr"):
                sizes.append(largest(value.jaxpr))
            elif hasattr(value, "eqns"):
                sizes.append(largest(value))
    return max(sizes)
