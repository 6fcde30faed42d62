"""Analyses of the AttentionNeuron paper that follow an evaluation.

``regression`` (Table 3): linear fits of the inputs on the codes; ``latents`` (Figure
4): the codes before and after a shuffle; ``codes`` (Figure 6): a map of the codes with
frames; ``patches`` (Figure 8): the most attended patches.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from marl_pool.evaluation import results
from marl_pool.evaluation.cases import TransferEnv
from marl_pool.evaluation.loading import EvaluationTarget, computing
from marl_pool.evaluation.settings import Analysis, EvaluateSettings
from marl_pool.studies.attention_neuron.attended import draw_attended
from marl_pool.studies.attention_neuron.latents import draw_code_map, draw_latents
from marl_pool.studies.attention_neuron.published import (
    PublishedRow,
    print_published,
    published_rows,
)
from marl_pool.studies.attention_neuron.regression import report_fits
from marl_pool.utils.errors import EXTRAS, UnfitTokensError, install_hint
from marl_pool.utils.tables import write_csv

if TYPE_CHECKING:
    from marl_pool.evaluation.run import EvaluatedRun

FILES: dict[Analysis, str] = {
    "regression": results.REGRESSION,
    "latents": results.LATENTS,
    "codes": results.CODES,
    "patches": results.PATCHES,
}


def analyse_run(evaluated: "EvaluatedRun", settings: EvaluateSettings) -> list[Path]:
    """Compare an evaluation with published numbers, and make its analyses.

    Returns:
        The files written.
    """
    target, files = evaluated.target, evaluated.files
    paths = []
    rows = published_rows(evaluated.results.results, target.policies, target.env)
    if rows:
        print_published(rows)
        paths.append(files.path(results.PUBLISHED))
        write_csv(paths[0], PublishedRow._fields, (row._asdict() for row in rows))
    with computing(settings.threads, env_timeout=settings.env_timeout):
        return paths + analyse(
            settings.analyses, target, evaluated.transfers, settings.episodes, files
        )


def analyse(
    analyses: Sequence[Analysis],
    target: EvaluationTarget,
    transfers: Sequence[TransferEnv],
    episodes: int,
    files: results.Files,
) -> list[Path]:
    """Make analyses; print the reason for one that does not fit the policy.

    ``transfers`` and ``episodes`` are those of the evaluation.

    Returns:
        The files written.
    """
    functions: dict[Analysis, Callable[[Path], None]] = {
        "regression": partial(report_fits, target, episodes),
        "latents": partial(draw_latents, target),
        "codes": partial(draw_code_map, target),
        "patches": partial(draw_attended, target, transfers),
    }
    paths = []
    for name in dict.fromkeys(analyses):
        path = files.path(FILES[name])
        try:
            functions[name](path)
        except UnfitTokensError as error:
            # An analysis may need other tokens, or a package that is missing.
            print(f"not made: {name}: {error}")
        except ModuleNotFoundError as error:
            module = (error.name or "").partition(".")[0]
            if module not in EXTRAS:
                raise
            print(f"not made: {name}: {install_hint(module)}")
        else:
            paths.append(path)
    return paths
