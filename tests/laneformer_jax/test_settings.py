import math
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laneformer_jax.config import LaneformerConfig
from laneformer_jax.errors import UserError
from laneformer_jax.presets import preset
from laneformer_jax.settings import configs_dir, find_config, from_dict, load, replace, to_yaml


@dataclass(frozen=True)
class Model:
    hidden_size: int = 64
    heads: int = 8
    head_size: int | None = None
    kind: Literal["replicate", "lane"] = "replicate"

    def __post_init__(self) -> None:
        if self.hidden_size % self.heads:
            raise UserError(f"heads: {self.heads} must divide hidden_size {self.hidden_size}")
        if self.head_size is None:
            object.__setattr__(self, "head_size", self.hidden_size // self.heads)


@dataclass(frozen=True)
class Files:
    paths: tuple[Path, ...]
    weight: float = 1.0
    kind: Literal["files"] = "files"


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True)
class Run:
    lr: float = 1e-3
    steps: int = 10
    name: str = "run"
    resume: bool = False
    colour: Colour = Colour.RED
    out: Path | None = None
    model: Model = field(default_factory=Model)
    small: Model = field(default_factory=lambda: Model(hidden_size=16, heads=4, kind="lane"))
    teacher: Model | None = None
    sources: tuple[Files, ...] = (Files((Path("a"),)), Files((Path("b"),), 2.0))
    named: dict[str, Files] = field(default_factory=dict)
    betas: tuple[float, float] = (0.9, 0.95)


@dataclass(frozen=True)
class Required:
    lr: float
    steps: int = 1


def message(*overrides, path=None, cls=Run):
    with pytest.raises(UserError) as caught:
        load(cls, path, overrides)
    text = str(caught.value)
    assert "\n" not in text
    return text


def write(tmp_path, text):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return path


# Reading


def test_defaults():
    assert load(Run) == Run()


def test_file_then_overrides_the_last_wins(tmp_path):
    path = write(tmp_path, "lr: 3e-4\nmodel: {hidden_size: 128}\nsources:\n- paths: [x, y]\n")
    run = load(Run, path, ["steps=5", "steps=1e5", "sources.0.weight=2", "colour=blue"])
    assert run == Run(
        lr=3e-4,
        steps=100_000,
        model=Model(hidden_size=128),
        sources=(Files((Path("x"), Path("y")), 2.0),),
        colour=Colour.BLUE,
    )
    assert run.model.head_size == 16


def test_a_mapping_is_laid_over_the_default_of_its_field():
    run = load(Run, None, ["small.heads=2", "model.heads=2", "teacher.heads=2"])
    assert run.small == Model(hidden_size=16, heads=2, head_size=4, kind="lane")
    # What the class itself derives is derived anew; what an instance holds is a given value.
    assert run.model.head_size == 32
    assert run.teacher == Model(heads=2)


def test_overrides_reach_into_default_lists_and_mappings():
    run = load(Run, None, ["sources.1.weight=9", "named.x={paths: [p]}", "named.x.weight=3"])
    assert [s.weight for s in run.sources] == [1.0, 9.0]
    assert run.named == {"x": Files((Path("p"),), 3.0)}


def test_a_given_mapping_field_replaces_the_default(tmp_path):
    @dataclass(frozen=True)
    class Holder:
        extra: dict[str, int] = field(default_factory=lambda: {"a": 1})

    assert load(Holder, write(tmp_path, "extra: {b: 2}")).extra == {"b": 2}
    assert load(Holder, None, ["extra.b=2"]).extra == {"a": 1, "b": 2}


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-3", 1e-3), ("1E5", 1e5), (".5", 0.5), ("-1.5e+2", -150.0), ("1_000", 1000.0)],
)
def test_numbers_that_yaml_1_1_takes_for_text(text, value):
    assert load(Run, None, [f"lr={text}"]).lr == value


@pytest.mark.parametrize("text", ["on", "no", "off", "12:30", "2024-01-01", "a=b"])
def test_text_that_yaml_1_1_takes_for_something_else(text):
    assert load(Run, None, [f"name={text}"]).name == text


def test_leading_zero_is_not_octal():
    assert load(Run, None, ["steps=010"]).steps == 10


def test_null_resets_an_optional_field(tmp_path):
    assert load(Run, write(tmp_path, "teacher: {}\n"), ["teacher=null"]).teacher is None


def test_an_empty_file_means_defaults(tmp_path):
    assert load(Run, write(tmp_path, "# nothing\n")) == Run()


def test_replace_keeps_the_rest():
    run = Run(lr=0.5, small=Model(hidden_size=32), sources=())
    assert replace(run, ["steps=3", "small.heads=4", "small.head_size=null"]) == Run(
        lr=0.5, steps=3, small=Model(hidden_size=32, heads=4), sources=()
    )
    with pytest.raises(UserError, match=r"^'stesp=3': stesp: unknown field \(did you mean 'steps'"):
        replace(run, ["stesp=3"])


# Refusals


def test_unknown_fields_at_any_depth_name_path_and_nearest():
    assert message("model.hiden_size=3") == (
        "'model.hiden_size=3': model.hiden_size: unknown field (did you mean 'hidden_size'?)"
    )
    assert "sources.1.wieght: unknown field (did you mean 'weight'?)" in message(
        "sources.1.wieght=1"
    )
    assert "named.x.pths: unknown field (did you mean 'paths'?)" in message("named.x.pths=[a]")
    assert "teacher.hiden_size: unknown" in message("teacher.hiden_size=3")
    assert message("zzz=1").endswith(
        "zzz: unknown field; allowed: lr, steps, name, resume, colour, out, model, small, "
        "teacher, sources, named, betas"
    )


def test_errors_in_a_file_name_the_file(tmp_path):
    path = write(tmp_path, "steps: many\n")
    assert message(path=path).startswith(f"{path}: steps = 'many': must be a valid integer")
    assert message("lr=x", path=write(tmp_path, "steps: 3")).startswith("'lr=x': lr = 'x': must")


def test_several_errors_fit_one_line(tmp_path):
    path = write(tmp_path, "a1: 1\nb1: 1\nc1: 1\nd1: 1\n")
    text = message(path=path)
    assert text.count("unknown field") == 3
    assert text.endswith("; and 1 more")


def test_wrong_values_name_what_is_allowed():
    assert message("model.kind=lnae") == (
        "'model.kind=lnae': model.kind = 'lnae': must be 'replicate' or 'lane' "
        "(did you mean 'lane'?)"
    )
    assert message("colour=bleu") == (
        "'colour=bleu': colour = 'bleu': must be 'red' or 'blue' (did you mean 'blue'?)"
    )
    assert "steps = 1.5: must be a valid integer" in message("steps=1.5")
    assert message("model=3") == "'model=3': model = 3: must be a mapping"
    assert message("sources=3") == "'sources=3': sources = 3: must be a list"
    assert "betas: item 1 is required, but not given" in message("betas=[0.9]")


def test_true_is_not_a_number():
    assert message("steps=true") == "'steps=true': steps = True: must be a number"
    assert "betas.0 = True: must be a number" in message("betas=[true, 0.9]")
    assert load(Run, None, ["resume=true"]).resume is True


def test_missing_required_field():
    assert message(cls=Required) == "lr: required, but not given"
    assert message("l_r=1", cls=Required) == (
        "'l_r=1': l_r: unknown field (did you mean 'lr'?); lr: required, but not given"
    )


def test_errors_of_the_class_itself_come_through_with_their_path():
    assert message("model.heads=3") == "'model.heads=3': model.heads: 3 must divide hidden_size 64"
    with pytest.raises(UserError, match=r"^here: heads: 3 must divide hidden_size 64$"):
        from_dict(Model, {"heads": 3}, source="here")


def test_a_model_config_is_a_setting_like_any_other():
    @dataclass(frozen=True)
    class Train:
        model: LaneformerConfig = field(default_factory=lambda: preset("tiny"))

    assert load(Train, None, ["model.rope_scaling.factor=8"]).model.rope_scaling.factor == 8.0
    assert "model.hiden_size: unknown field (did you mean 'hidden_size'?)" in message(
        "model.hiden_size=8", cls=Train
    )
    assert "model.broadcast_delay: 0 is not possible" in message(
        "model.broadcast_delay=0", cls=Train
    )
    assert "'model.rope_scaling={factor: 0.5}': model.rope_scaling.factor: 0.5 must" in message(
        "model.rope_scaling={factor: 0.5}", cls=Train
    )
    assert load(Train).model == preset("tiny")


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("steps: 1\nsteps: 2\n", "run.yaml:2:1: not valid YAML: key 'steps' is given twice"),
        ("model:\n  heads: 1\n  heads: 2\n", "run.yaml:3:3: not valid YAML: key 'heads'"),
        ("lr: [1\n", "run.yaml:2:1: not valid YAML: "),
        ("lr: " + "[" * 3000 + "]" * 3000, "run.yaml:1:104: not valid YAML: nested more than 100"),
        ("- 1\n", "run.yaml: must hold a mapping of settings, holds list"),
        ("lr: !!python/object:os.system x\n", "run.yaml:1:5: not valid YAML: "),
    ],
)
def test_broken_files(tmp_path, text, part):
    assert part in message(path=write(tmp_path, text))


def test_unreadable_files(tmp_path):
    assert message(path=tmp_path / "no.yaml") == (
        f"{tmp_path / 'no.yaml'}: cannot be read (No such file or directory)"
    )
    (tmp_path / "latin.yaml").write_bytes(b"name: \xe9\n")
    assert message(path=tmp_path / "latin.yaml").endswith("is not UTF-8 text (byte 6)")


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("steps", "has the form name=value"),
        ("=3", "has the form name=value"),
        ("a..b=3", "has the form name=value"),
        ("lr=[1", "'lr=[1':1:3: not valid YAML"),
        ("sources.2.weight=1", "sources is a list, its indices are 0 to 1"),
        ("sources.x.weight=1", "sources is a list, its indices are 0 to 1"),
        ("sources.-1.weight=1", "sources is a list, its indices are 0 to 1"),
        ("steps.x=1", "steps = a mapping: must be a valid integer"),
    ],
)
def test_broken_overrides(override, part):
    assert part in message(override)


# Round trip

text = st.text(
    st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=12
) | st.sampled_from(
    [
        "1e-3",
        "no",
        "null",
        "~",
        "",
        "010",
        "1_000",
        "true",
        "<<",
        "=",
        "- x",
        "a: b",
        "#",
        "0x1f",
        ".inf",
    ]
)
floats = st.floats(allow_nan=False)
models = st.builds(Model, st.just(64), st.sampled_from([1, 2, 4]), kind=st.sampled_from(["lane"]))
files = st.builds(
    Files, st.lists(text.map(Path), max_size=2).map(tuple), floats, kind=st.just("files")
)
runs = st.builds(
    Run,
    lr=floats,
    steps=st.integers(),
    name=text,
    resume=st.booleans(),
    colour=st.sampled_from(Colour),
    out=st.none() | text.map(Path),
    model=models,
    small=models,
    teacher=st.none() | models,
    sources=st.lists(files, max_size=3).map(tuple),
    named=st.dictionaries(text, files, max_size=2),
    betas=st.tuples(floats, floats),
)


@settings(max_examples=150, deadline=None)
@given(runs)
def test_yaml_round_trip(tmp_path_factory, run):
    path = tmp_path_factory.getbasetemp() / "round.yaml"
    path.write_text(to_yaml(run), encoding="utf-8", newline="")
    assert load(Run, path) == run


def test_infinity_and_nan_round_trip(tmp_path):
    path = write(tmp_path, to_yaml(Run(lr=math.inf, betas=(-math.inf, math.nan))))
    run = load(Run, path)
    assert run.lr == math.inf
    assert run.betas[0] == -math.inf
    assert math.isnan(run.betas[1])


# Shipped configs


def test_configs_are_found_in_the_checkout():
    assert configs_dir() == Path(__file__).parents[2] / "configs"


def test_find_config_takes_paths_and_shipped_names(tmp_path, monkeypatch):
    from laneformer_jax import settings as module

    shipped = tmp_path / "configs"
    (shipped / "phases").mkdir(parents=True)
    (shipped / "phases" / "pretrain.yaml").write_text("steps: 1\n")
    monkeypatch.setattr(module, "configs_dir", lambda: shipped)
    mine = write(tmp_path, "steps: 2\n")
    assert find_config(mine) == mine
    assert find_config("phases/pretrain") == shipped / "phases" / "pretrain.yaml"
    assert find_config("phases/pretrain.yaml") == shipped / "phases" / "pretrain.yaml"
    with pytest.raises(UserError, match=r"did you mean 'phases/pretrain'\?.*shipped configs: ph"):
        find_config("phases/pretran")
