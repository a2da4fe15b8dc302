"""One token of decoding as few launches: Pallas kernels for NVIDIA and AMD GPUs, through Triton.

`step.decode_step` is one token through all layers on this device's lanes; the modules beside it hold one
operation each: what it computes in jnp, the kernel, and a function that launches it. `backend` is the
only module that knows Pallas.
"""
