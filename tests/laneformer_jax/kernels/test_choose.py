"""Which kernels run where, and what a user hears about it."""

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from laneformer_jax import settings
from laneformer_jax.errors import UserError
from laneformer_jax.kernels import tuning
from laneformer_jax.kernels.choose import choose
from laneformer_jax.presets import preset

CONFIG = preset("laneformer-2b")


def device(platform, kind, capability=None, processors=0):
    return SimpleNamespace(
        platform=platform,
        device_kind=kind,
        compute_capability=capability,
        core_count=processors,
    )


CPU = device("cpu", "cpu")
H200 = device("gpu", "NVIDIA H200", "9.0", 132)
MI300X = device("gpu", "AMD Instinct MI300X", "gfx942:sramecc+:xnack-", 304)
T4 = device("gpu", "Tesla T4", "7.5")
MI250 = device("gpu", "AMD Instinct MI250X", "gfx90a")


@pytest.fixture(autouse=True)
def cache_folder(tmp_path, monkeypatch):
    """No table that this user has tuned."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.mark.parametrize(
    ("name", "chosen"),
    [("auto", "fused"), ("fused", "fused"), ("layer", "layer"), ("token", "token")],
)
@pytest.mark.parametrize("gpu", [H200, MI300X])
def test_kernels_where_they_can_run(name, chosen, gpu, capsys):
    assert choose(name, CONFIG, gpu) == chosen
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("config", "alone", "chosen"),
    [
        (CONFIG, True, "token"),
        (CONFIG, False, "fused"),  # lanes on several devices
        (preset("laneformer-2b", use_early_comm=True), True, "fused"),
    ],
)
def test_auto_is_what_was_tuned_for_the_device_where_the_model_can_run_it(config, alone, chosen):
    table = replace(tuning.shipped("sm_90"), auto="token", out=tuning.Rows(32, 256))
    path = tuning.tuned_path(H200)
    path.parent.mkdir(parents=True)
    path.write_text(settings.to_yaml(table))
    assert path.name == "nvidia-h200.yaml"
    assert tuning.for_device(H200) == table
    assert tuning.for_device(MI300X) == tuning.shipped("gfx942")
    assert choose("auto", config, H200, alone=alone) == chosen


def test_a_tuned_table_that_is_none_is_one_line():
    path = tuning.tuned_path(H200)
    path.parent.mkdir(parents=True)
    path.write_text("qkv: {rows: 8, columns: 1024}\nqvk: {}\n")
    with pytest.raises(UserError, match=r"nvidia-h200\.yaml.*qvk"):
        choose("auto", CONFIG, H200)


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("qkv: {rows: 48, columns: 1024}", "qkv.rows = 48: must be a power of two"),
        ("head: {rows: 8, columns: 0}", "head.columns = 0: must be a power of two"),
        ("attention: {splits: 0, keys: 64}", "attention.splits = 0: must be at least 1"),
        ("out: {rows: 8, columns: 64, launch: {warps: 3}}", "warps = 3: must be a power of two"),
        ("layer: {count: 133}", "layer.count: 133 .* at most the 132 multiprocessors"),
    ],
)
def test_a_tuned_table_that_would_hang_or_give_wrong_sums_is_one_line(line, named):
    shipped = Path(tuning.__file__).parent / "tables" / "sm_90.yaml"
    lines = [x for x in shipped.read_text().splitlines() if x.split(":")[0] != line.split(":")[0]]
    path = tuning.tuned_path(H200)
    path.parent.mkdir(parents=True)
    path.write_text("\n".join([*lines, line]))
    with pytest.raises(UserError, match=named):
        choose("auto", CONFIG, H200)


@pytest.mark.parametrize(
    ("gpu", "programs"),
    [
        (H200, 128),
        (MI300X, 296),
        (device("gpu", "NVIDIA A100-SXM4-80GB", "8.0", 108), 104),
        (device("gpu", "NVIDIA H200 MIG 1g.18gb", "9.0", 16), 12),
        (device("gpu", "AMD Instinct MI300A", "gfx942", 228), 224),
    ],
)
def test_programs_that_wait_for_each_other_are_on_the_gpu_at_once(gpu, programs):
    assert tuning.for_device(gpu).layer.count == programs


def test_auto_is_silent_where_nobody_expects_kernels(capsys):
    assert choose("auto", CONFIG, CPU) == "xla"
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("config", "gpu", "weights", "why"),
    [
        (CONFIG, T4, "native", "device gpu (Tesla T4)"),
        (CONFIG, MI250, "native", "device gpu (AMD Instinct MI250X)"),
        (CONFIG, H200, "int8", "weights int8"),
        (preset("tiny", qk_norm=True), H200, "native", "qk_norm"),
        (preset("tiny", ladder_residual=True), H200, "native", "ladder_residual"),
    ],
)
def test_a_gpu_that_falls_back_says_why_in_one_line(config, gpu, weights, why, capsys):
    assert choose("auto", config, gpu, weights) == "xla"
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert why in err
    with pytest.raises(UserError) as error:
        choose("fused", config, gpu, weights)
    assert why in str(error.value)


def test_a_jax_without_the_lowering_says_so_in_one_line(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "laneformer_jax.kernels.backend", None)
    assert choose("auto", CONFIG, H200) == "xla"
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "no Triton lowering" in err
    with pytest.raises(UserError, match="no Triton lowering"):
        choose("fused", CONFIG, H200)
    assert choose("auto", CONFIG, CPU) == "xla"
    assert capsys.readouterr() == ("", "")


def test_names():
    with pytest.raises(UserError, match="did you mean 'fused'"):
        choose("fusd", CONFIG, H200)
    with pytest.raises(UserError, match="compute capability"):
        choose("fused", CONFIG, CPU)
    assert choose("interpret-layer", CONFIG, CPU) == "interpret-layer"
    with pytest.raises(UserError, match="lanes on several devices"):
        choose("token", CONFIG, H200, alone=False)
    with pytest.raises(UserError, match="use_early_comm"):
        choose("interpret-token", preset("tiny", use_early_comm=True), CPU)
    assert choose("xla", preset("tiny", qk_norm=True), CPU) == "xla"
