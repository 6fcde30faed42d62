"""Evaluation as the command does it, and perturbations written as in a suite."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from marl_pool.evaluation.analyses import analyse_run
from marl_pool.evaluation.evaluate import evaluate_run
from marl_pool.evaluation.settings import EvaluateSettings, PerturbationLevels
from marl_pool.runs.run import Run


def levels(*entries: Mapping[str, Any]) -> list[PerturbationLevels]:
    """Parse perturbations ``{"name": …, "severities": […], **options}``."""
    return [PerturbationLevels.from_config(entry) for entry in entries]


def evaluate(
    run: Run, config: Mapping[str, Any], plugins: tuple[str, ...] = ()
) -> list[Path]:
    """Evaluate and analyze a run with a composed configuration; return the files."""
    settings = EvaluateSettings.from_config(config)
    evaluated = evaluate_run(run, settings, env=config["env"], plugins=plugins)
    return evaluated.paths + analyse_run(evaluated, settings)
