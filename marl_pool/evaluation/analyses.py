"""Analyses from installed packages, which run after an evaluation."""

from collections.abc import Callable
from pathlib import Path

from marl_pool.evaluation.computing import computing
from marl_pool.evaluation.evaluate import EvaluatedRun
from marl_pool.evaluation.settings import ANALYSES, EvaluateSettings
from marl_pool.options.plugins import installed, load
from marl_pool.utils.errors import EXTRAS, UnfitTokensError, install_hint

Analysis = Callable[[EvaluatedRun, EvaluateSettings], Path]
"""Writes one file and returns its path."""


def analyse_run(evaluated: EvaluatedRun, settings: EvaluateSettings) -> list[Path]:
    """Run each package's ``after_evaluation`` hook, then the requested analyses.

    Returns:
        The files written. An analysis that does not fit the policy, or needs a missing
        package, is left out, and the reason is printed.
    """
    paths: list[Path] = []
    for plugins in installed().values():
        if plugins.after_evaluation:
            paths += load(plugins.after_evaluation)(evaluated)
    limit = settings.env_timeout
    with computing(settings.threads, settings.kernels, limit, settings.device):
        for name in dict.fromkeys(settings.analyses):
            analysis: Analysis = load(ANALYSES[name])
            try:
                paths.append(analysis(evaluated, settings))
            except UnfitTokensError as error:
                print(f"not made: {name}: {error}")
            except ModuleNotFoundError as error:
                module = (error.name or "").partition(".")[0]
                if module not in EXTRAS:
                    raise
                print(f"not made: {name}: {install_hint(module)}")
    return paths
