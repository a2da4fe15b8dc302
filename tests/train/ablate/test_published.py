"""docs/ablation.md says what its committed results say."""

import json
import shutil
from pathlib import Path

from laneformer_jax import settings
from train.ablate import report
from train.ablate.config import AblationConfig
from train.ablate.runs import Ablation

DOCS = Path(__file__).parents[3] / "docs"


def test_the_page_holds_the_table_that_the_shipped_ablation_makes_of_the_results(tmp_path):
    shutil.copy(DOCS / "ablation" / report.RESULTS, tmp_path)
    config = settings.load(AblationConfig, settings.find_config("ablation/lanes"))
    table = report.write(Ablation(config, tmp_path))
    assert table == (DOCS / "ablation" / report.TABLE).read_text()
    assert table in (DOCS / "ablation.md").read_text()
    for name in ("loss", "gap-delay", "gap-lanes", "drift"):
        assert (tmp_path / f"{name}.svg").exists()


def test_the_quieter_start_is_that_and_no_other_difference():
    page = (DOCS / "ablation.md").read_text()
    assert (DOCS / "ablation" / "quiet" / report.TABLE).read_text() in page
    loud, quiet = (
        [json.loads(line) for line in (DOCS / folder / report.RESULTS).read_text().splitlines()]
        for folder in ("ablation", "ablation/quiet")
    )
    assert len(loud) == 60
    runs = {(r["cell"], r["seed"]): r["run"] for r in loud if r["role"] == "compare"}
    for row in quiet:
        own, other = dict(row["run"]), dict(runs[row["cell"], row["seed"]])
        assert own["model"].pop("residual_init_scale") == 0.1
        other["model"].pop("residual_init_scale", None)
        assert own["optimizer"].pop("learning_rate") == 0.005
        other["optimizer"].pop("learning_rate")
        assert own == other
