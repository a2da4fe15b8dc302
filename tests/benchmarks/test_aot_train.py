"""What the benchmark reads off XLA's schedule."""

import importlib.util
from pathlib import Path

FILE = Path(__file__).parents[2] / "benchmarks" / "aot_train.py"
SCHEDULE = """\
HloModule jit_update

%sum (a: f32[], b: f32[]) -> f32[] {
  ROOT %add = f32[] add(%a, %b)
}

ENTRY %main {
  %p = f32[1,8,4]{2,1,0} parameter(0)
  %all-reduce-start = f32[1,8,4]{2,1,0} all-reduce-start(%p), metadata={op_name="jvp()/psum"}
  %fusion.1 = f32[8] fusion(%p), kind=kLoop
  %gemm = f32[8] custom-call(%p), custom_call_target="__cublas$gemm"
  %all-reduce-done = f32[1,8,4]{2,1,0} all-reduce-done(%all-reduce-start), metadata={op_name="jvp()/psum"}
  %all-reduce.2 = f32[1,8,4]{2,1,0} all-reduce(%p), metadata={op_name="transpose(jvp())/psum"}
  %all-reduce.3 = f32[] all-reduce(%p)
  ROOT %all-reduce.4 = (f32[64], f32[2]) all-reduce(%p, %p)
}
"""


def test_kernels_between_start_and_end():
    spec = importlib.util.spec_from_file_location("aot_train", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.in_flight(SCHEDULE, (1, 8, 4)) == {
        "kernels": 2,
        "in_flight": {"forward": [2], "backward": [0]},
        "joined": 1,
        "small_sums": 1,
    }
