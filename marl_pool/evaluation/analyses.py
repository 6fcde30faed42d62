"""Analyses of installed packages, which follow an evaluation."""

from collections.abc import Callable
from pathlib import Path

from marl_pool.evaluation.computing import computing
from marl_pool.evaluation.evaluate import EvaluatedRun
from marl_pool.evaluation.settings import ANALYSES, EvaluateSettings
from marl_pool.options.plugins import installed, load
from marl_pool.utils.errors import EXTRAS, UnfitTokensError, install_hint

Analysis = Callable[[EvaluatedRun, EvaluateSettings], Path]
"""Write one file, and return its path."""


def analyse_run(evaluated: EvaluatedRun, settings: EvaluateSettings) -> list[Path]:
    """Make what each package adds to an evaluation, then the analyses asked for.

    Returns:
        The files written. The reason for an analysis that does not fit the policy, or
        needs a missing package, is printed.
    """
    paths: list[Path] = []
    for plugins in installed().values():
        if plugins.after_evaluation:
            paths += load(plugins.after_evaluation)(evaluated)
    with computing(settings.threads, env_timeout=settings.env_timeout):
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
