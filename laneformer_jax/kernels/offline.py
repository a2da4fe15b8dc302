"""What kernels become on a GPU, found out without one: Triton's IR, and what it compiles to.

`lower` needs only JAX; `compiled` also the package `triton` (extra `kernels-check`).
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import AbstractMesh

from laneformer_jax.compat import JAX_VERSION

# Platform of the lowering, and what stands in for a GPU of that name.
TARGETS = {"sm_90": ("cuda", "NVIDIA H200"), "gfx942": ("rocm", "gfx942")}


@dataclass(frozen=True)
class Kernel:
    """One launch of a lowered program."""

    name: str
    grid: tuple[int, int, int]
    warps: int
    stages: int
    ir: str


@dataclass(frozen=True)
class Resources:
    """What a compiled kernel takes of a GPU. Shared memory in bytes.

    spills: to memory, in bytes a thread. scalars: registers of a wave that are kept in lanes of vector
    registers for want of scalar ones, which costs an instruction each way and no memory; AMD only.
    """

    registers: int
    spills: int
    shared: int
    scalars: int = 0


@contextlib.contextmanager
def on(target: str) -> Iterator[None]:
    """Kernels traced and lowered in here are for `target`."""
    if JAX_VERSION < (0, 11):  # takes the platform of the lowering
        yield
        return
    from jax.sharding import AbstractDevice

    platform, kind = TARGETS[target]
    device = AbstractDevice(device_kind=kind, num_cores=None, platform=platform)
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        yield


def lower(function: Callable[..., Any], *args: Any, target: str = "sm_90") -> Any:
    """`function` (jitted or not) lowered for `target`, on any machine."""
    with on(target):
        jitted = function if hasattr(function, "trace") else jax.jit(function)
        return jitted.trace(*args).lower(lowering_platforms=(TARGETS[target][0],))


def kernels(lowered: Any) -> list[Kernel]:
    """The Triton launches of a lowered program, in order."""
    from jax._src.interpreters.mlir import make_ir_context
    from jax._src.lib import triton
    from jax._src.lib.mlir import ir

    found = []

    def visit(operation: Any) -> None:
        if operation.name == "stablehlo.custom_call":
            target = ir.StringAttr(operation.attributes["call_target_name"]).value
            if target == "__gpu$xla.gpu.triton":
                found.append(_kernel(operation))
        for region in operation.regions:
            for block in region.blocks:
                for inner in block.operations:
                    visit(inner.operation)

    def _kernel(operation: Any) -> Kernel:
        key = "mhlo.backend_config"
        attributes = operation.attributes
        config = ir.DictAttr(attributes[key if key in attributes else "backend_config"])
        number = {
            n: int(ir.IntegerAttr(config[n]).value)
            for n in ("grid_x", "grid_y", "grid_z", "num_warps", "num_stages")
        }
        with make_ir_context() as context:
            triton.dialect.register_dialect(context)
            module = ir.Module.parse(ir.StringAttr(config["ir"]).value_bytes)
            text = module.operation.get_asm(enable_debug_info=False)
        return Kernel(
            ir.StringAttr(config["name"]).value,
            (number["grid_x"], number["grid_y"], number["grid_z"]),
            number["num_warps"],
            number["num_stages"],
            str(text),
        )

    visit(lowered.compiler_ir("stablehlo").operation)
    return found


def compiled(kernel: Kernel, target: str) -> Resources:
    """Compile a kernel's IR for `target` with PyPI's Triton and say what it takes."""
    import triton
    from triton.backends.compiler import GPUTarget

    gpu = GPUTarget("cuda", 90, 32) if target == "sm_90" else GPUTarget("hip", target, 64)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{kernel.name}.ttir"
        path.write_text(kernel.ir)
        options = dict(num_warps=kernel.warps, num_stages=kernel.stages)
        binary = triton.compile(str(path), target=gpu, options=options)
        shared = int(binary.metadata.shared)
        if target == "sm_90":
            return Resources(*_ptxas(binary.asm["ptx"], Path(folder)), shared)
    names = "vgpr_count|[vs]gpr_spill_count|private_segment_fixed_size"
    found = re.findall(rf"\.({names}):\s*(\d+)", binary.asm["amdgcn"])
    numbers = {name: int(number) for name, number in found}
    spills = max(4 * numbers["vgpr_spill_count"], numbers["private_segment_fixed_size"])
    return Resources(numbers["vgpr_count"], spills, shared, numbers["sgpr_spill_count"])


def _ptxas(ptx: str, folder: Path) -> tuple[int, int]:
    """Registers of a thread and bytes that it spills, as NVIDIA's assembler reports them."""
    import triton

    (folder / "kernel.ptx").write_text(ptx)
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    arch = "sm_90a" if "sm_90a" in ptx else "sm_90"
    for tool in sorted(
        tools.glob("ptxas*")
    ):  # the newest PTX is for the one named after a newer GPU
        command: list[str | Path] = [
            tool,
            "-v",
            f"-arch={arch}",
            folder / "kernel.ptx",
            "-o",
            folder / "kernel.cubin",
        ]
        out = subprocess.run(command, capture_output=True, text=True, check=False)
        if out.returncode == 0:
            break
    else:
        raise RuntimeError(f"ptxas failed: {out.stderr}")
    registers = re.search(r"Used (\d+) registers", out.stderr)
    assert registers is not None, out.stderr
    spilled = re.findall(r"(\d+) bytes spill (?:stores|loads)", out.stderr)
    return int(registers[1]), sum(map(int, spilled))
