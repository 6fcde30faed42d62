"""What an evaluation looks at beside returns: the analyses of AttentionNeuron's paper.

``regression``: what a linear map finds of the inputs in the codes; ``latents``: the
codes before and after a shuffle; ``codes``: a map of them, with what was seen;
``patches``: the most attended ones.
"""

from collections.abc import Sequence
from pathlib import Path

from marl_pool.evaluation.cases import TransferEnv
from marl_pool.evaluation.loading import EvaluationTarget
from marl_pool.evaluation.results import CODES, LATENTS, PATCHES, REGRESSION, Files
from marl_pool.evaluation.settings import Analysis
from marl_pool.utils.errors import UnfitTokensError

FILES: dict[Analysis, str] = {
    "regression": REGRESSION,
    "latents": LATENTS,
    "codes": CODES,
    "patches": PATCHES,
}
EXTRAS = {"sklearn": "analysis", "matplotlib": "plots", "cv2": "plots"}
"""Which extra installs a module that an analysis needs."""


def analyse(
    wanted: Sequence[Analysis],
    subject: EvaluationTarget,
    others: Sequence[TransferEnv],
    episodes: int,
    files: Files,
) -> list[Path]:
    """Make the analyses; what cannot be made is said and left out.

    Args:
        wanted: which.
        subject: what is evaluated.
        others: the other worlds of the evaluation.
        episodes: of the evaluation.
        files: names for what is written.

    Returns:
        What was written.
    """
    made = []
    for name in dict.fromkeys(wanted):
        path = files.path(FILES[name])
        try:
            _make(name, subject, others, episodes, path)
        except UnfitTokensError as error:
            print(f"not made: {name}: {error}")
        except ModuleNotFoundError as error:
            module = (error.name or "").partition(".")[0]
            if module not in EXTRAS:
                raise
            print(f'not made: {name}: pip install "marl-pool[{EXTRAS[module]}]"')
        else:
            made.append(path)
    return made


def _make(
    name: Analysis,
    subject: EvaluationTarget,
    others: Sequence[TransferEnv],
    episodes: int,
    path: Path,
) -> None:
    if name == "regression":
        from marl_pool.studies.attention_neuron.regression import (
            print_fits,
            regress,
            write_fits,
        )

        fits = regress(subject, episodes)
        print_fits(fits)
        write_fits(path, fits)
    elif name == "patches":
        from marl_pool.studies.attention_neuron.attended import draw_attended

        draw_attended(subject, others, path)
    else:
        from marl_pool.studies.attention_neuron.latents import (
            draw_code_map,
            draw_latents,
        )

        if name == "latents":
            draw_latents(subject, path)
        else:
            draw_code_map(subject, path, subject.seed)
