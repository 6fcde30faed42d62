"""Every study that `fit` offers runs from one command, and every preset composes."""

import json
import math
from pathlib import Path

import pytest

from helpers.image_files import write_mnist
from marl_pool.cli.main import main
from marl_pool.config.grid import plan_sweep
from marl_pool.config.option_files import files_of
from marl_pool.training.supervised import TASKS
from marl_pool.training.supervised.fit import make_task
from marl_pool_studies.images import load_images

PRESETS = [
    name
    for name, file in sorted(files_of("experiment").items())
    if "--verb fit" in file.read_text(encoding="utf-8")
    or "- task:" in file.read_text(encoding="utf-8")
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of images: as MNIST and as Fashion-MNIST."""
    folder = tmp_path_factory.mktemp("images")
    for name in ("mnist", "fashion_mnist"):
        write_mnist(folder / name, train=400, test=100)
        assert len(load_images(name, folder).train) == 400
    return folder


@pytest.mark.parametrize("task", TASKS)
def test_a_tiny_study_runs_from_one_command(task, data, tmp_path, capsys) -> None:
    run = tmp_path / "run"
    # Sets of vectors are made where the images lie, unless they are there.
    folder = f"data_dir='{tmp_path if task == 'knn_centroid' else data}'"
    overrides = [f"task={task}", "scale=tiny", "threads=1", folder]
    assert main(["fit", *overrides, "--run-dir", str(run)]) == 0
    assert "parameters; test set" in capsys.readouterr().out
    results = json.loads((run / "results.json").read_text(encoding="utf-8"))
    assert results["scale"] == "tiny"
    assert all(map(math.isfinite, results["mean"].values()))
    assert results["mean"]
    if true_loss := results["baselines"].get("true mixture"):
        assert results["mean"]["loss"] > true_loss
    assert all((run / picture).is_file() for picture in results["pictures"])
    assert main(["resume", str(run)]) == 0
    assert "epochs are done" in capsys.readouterr().out


TRIALS = {
    **{"adapool/figure4": 16, "adapool/figure4_paper": 32},
    **{"adapool/table2": 15, "adapool/table8": 20},
}


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_composes(preset: str) -> None:
    plan = plan_sweep([f"experiment={preset}"], verb="fit")
    assert len(plan.trials) > 1
    assert len(plan.trials) == TRIALS.get(preset, len(plan.trials))
    for trial in plan.trials:
        make_task(trial.config)
    contents = {json.dumps(trial.config.plain) for trial in plan.trials}
    assert len(contents) == len(plan.trials)
    smaller = plan_sweep([f"experiment={preset}", "scale=cpu"], verb="fit").trials
    assert {trial.config.scale for trial in smaller} == {"cpu"}
