"""Comparison of an evaluation with published numbers, and regression on codes."""

import math
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from marl_pool.evaluation import results
from marl_pool.evaluation.evaluate import EvaluatedRun
from marl_pool.evaluation.results import NAN
from marl_pool.evaluation.settings import EvaluateSettings
from marl_pool.evaluation.target import EvaluationTarget
from marl_pool.files.tables import print_table, without_nan, write_csv
from marl_pool.utils.errors import UnfitTokensError
from marl_pool_studies.attention_neuron.published import (
    DATA,
    PublishedRow,
    published_rows,
)
from marl_pool_studies.attention_neuron.recording import (
    is_picture,
    record,
    validate_codes,
)

EPISODES = 64
"""Largest number of episodes in a fit."""


def compare_published(evaluated: EvaluatedRun) -> list[Path]:
    """Print and write measured rows beside published ones; return the files written."""
    target = evaluated.target
    rows = published_rows(evaluated.results.results, target.policies, target.env)
    if not rows:
        return []
    results.print_rows(
        "measured beside published (mean ± std over episodes)",
        ["perturbation"],
        ["mean return", "95 %", "measured", "published"],
        [
            [
                row.label,
                f"{row.mean:.3f}",
                # A single episode has neither an interval nor a standard deviation.
                _joined("{:.3f}", " to ", row.mean_low, row.mean_high),
                _joined("{:g}", " ± ", row.mean, row.std),
                f"{row.published:g} ± {row.published_std:g}",
            ]
            for row in rows
        ],
    )
    path = evaluated.files.unused("published.csv")
    measured = (without_nan(row._asdict()) for row in rows)
    write_csv(path, PublishedRow._fields, measured)
    return [path]


def regression(evaluated: EvaluatedRun, settings: EvaluateSettings) -> Path:
    """Fit the inputs linearly on the codes (Table 3); unknown values are empty."""
    fits = regress(evaluated.target, settings.episodes)
    # Each input has a row; the codes are many and appear as their mean.
    rows = [
        [fit.name, _shown(fit.r_squared), _shown(fit.published)]
        for fit in fits
        if fit.explained == "input"
    ]
    codes = [fit.r_squared for fit in fits if fit.explained == "code"]
    mean = float(torch.tensor(codes, dtype=torch.float64).nanmean())
    rows.append(["mean of the codes, on the inputs", _shown(mean)])
    columns = ["input, on the codes", "R²", "published"]
    print_table(columns, rows, title="R² of a linear regression")
    path = evaluated.files.unused("regression.csv")
    write_csv(path, Fit._fields, (without_nan(fit._asdict()) for fit in fits))
    return path


class Fit(NamedTuple):
    """R² of one number as a linear function of others."""

    explained: str
    """``"input"``, fitted on all codes, or ``"code"``, fitted on all inputs."""
    name: str
    r_squared: float
    """NaN for a number that never changes."""
    published: float = NAN


def r_squared(explaining: Tensor, explained: Tensor) -> Tensor:
    """Return R² of least squares with a constant, ``(k,)``.

    Each column of ``explained (n, k)`` is fitted by itself on ``explaining (n, p)``,
    both float64; R² is NaN for a constant column.
    """
    intercept = torch.ones_like(explaining[:, :1])
    # A rank below p is common: channels that never change, codes that are alike.
    scale = explaining.abs().amax(0).clamp(min=torch.finfo(explaining.dtype).tiny)
    design = torch.cat([explaining / scale, intercept], 1)
    solution = torch.linalg.lstsq(design, explained, driver="gelsd").solution
    residual = (explained - design @ solution).square().sum(0)
    total = (explained - explained.mean(0)).square().sum(0)
    constant = explained.amax(0) == explained.amin(0)
    return (1 - residual / total).masked_fill(constant, torch.nan)


def regress(target: EvaluationTarget, episodes: int) -> list[Fit]:
    """Play shuffled episodes and fit inputs on codes, and codes on inputs.

    Source: Tang and Ha (2021, https://arxiv.org/abs/2109.02869), Table 3: R² of each
    input, in its own order, on the codes. The fits of codes on inputs are not in the
    paper.

    Raises:
        UnfitTokensError: no sensory layer, or inputs that are pictures.
    """
    validate_codes(target)
    if is_picture(target):
        raise UnfitTokensError("expected readings, each of them a number, got bytes")
    # Shuffle the tokens: codes of an invariant layer do not depend on it.
    recording = record(target, range(min(episodes, EPISODES)), shuffled=True)
    codes, inputs = recording.codes.double(), recording.inputs.double()
    published = DATA["regression"] if target.env["name"] == "cartpole" else {}
    of_inputs = zip(_names(target), r_squared(codes, inputs).tolist(), strict=True)
    of_codes = enumerate(r_squared(inputs, codes).tolist())
    fits = [Fit("input", name, r2, published.get(name, NAN)) for name, r2 in of_inputs]
    return fits + [Fit("code", str(number), r2) for number, r2 in of_codes]


def _joined(form: str, separator: str, *values: float) -> str:
    """Format the values that are not NaN."""
    return separator.join(form.format(x) for x in values if not math.isnan(x))


def _shown(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.3f}"


def _names(target: EvaluationTarget) -> list[str]:
    """Return the names of the inputs, in the environment's own order."""
    env: Any = target.make_env(1)
    (group,) = env.groups.values()
    spec = group.tokens
    names = [f"token_{i}" for i in range(spec.num_tokens)]
    if hasattr(env, "channel_names"):
        names = list(env.channel_names())
    if len(set(names)) < len(names):  # duplicated channels
        names = [f"{name}_{i}" for i, name in enumerate(names)]
    if spec.num_features == 1:
        return names
    return [f"{name}[{f}]" for name in names for f in range(spec.num_features)]
