"""The numbers of a diagnosis: one record for a group of agents and each head."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from marl_pool.evaluation.diagnosis import theory
from marl_pool.evaluation.diagnosis.measures import Cases
from marl_pool.evaluation.diagnosis.observations import Observed
from marl_pool.evaluation.statistics.intervals import bootstrap

ALL = "all"
"""The row of all attention heads of a pooling head together."""
NAN = math.nan


@dataclass(frozen=True)
class Diagnosis:
    """Signal loss, relation scores and bounds: means over observations and heads.

    Losses are divided by ``variance``. What a head or a world has not is NaN: of a
    head without relation scores all from ``signal_width`` on; of a set without noise
    what compares it with the signal.
    """

    group: str
    pooling: str
    head: str
    """A number, or "all"; heads of MaxPool are single features."""
    heads: int = 0
    episodes: int = 0
    observations: int = 0
    num_tokens: float = NAN
    """Mean of N."""
    num_signal: float = NAN
    """Mean of k."""
    variance: float = NAN
    """Of a feature of the vectors below the head, of all sets together."""
    within: float = NAN
    """Share of the variance that is within the sets, not between their means."""
    signal_loss: float = NAN
    """Definition 3.2."""
    excess: float = NAN
    """‖x_c - mean(X_s)‖²/d: what of the signal loss is the head's."""
    excess_low: float = NAN
    """95 % percentile bootstrap interval over episodes: this policy only. NaN, as
    `excess_high`, for fewer than two episodes."""
    excess_high: float = NAN
    mean_excess: float = NAN
    """The excess that the mean of all tokens would have on the same vectors."""
    signal_weight: float = NAN
    """Weight of all signal tokens together."""
    uniform_weight: float = NAN
    """What it would be if all tokens weighed the same: k/N."""
    self_weight: float = NAN
    """Weight of the observer's own token, which is signal."""
    signal_width: float = NAN
    """ε_s, equation 8."""
    noise_width: float = NAN
    """ε_η, equation 8."""
    margin: float = NAN
    """M, equation 9."""
    distance: float = NAN
    """D, equation 9."""
    margin_positive: float = NAN
    """Share of the cases with M > 0, of those in which M is defined."""
    signal_low: float = NAN
    """L_s of Theorem 3.12."""
    signal_error: float = NAN
    """1/k - w of the signal tokens."""
    signal_high: float = NAN
    """U_s."""
    noise_low: float = NAN
    """L_η."""
    noise_error: float = NAN
    """-w of the noise tokens."""
    noise_high: float = NAN
    """U_η."""
    signal_bound_width: float = NAN
    """U_s - L_s; 1 says nothing about a weight."""
    noise_bound_width: float = NAN
    """U_η - L_η; 1 says nothing about a weight."""
    checked: int = 0
    """How many weights were held against their bounds."""
    violations: int = 0
    """How many of them were outside."""
    gap: str = ""
    """Why there are no numbers; empty where there are."""


def diagnoses(
    group: str, pooling: str, observed: Observed, cases: Cases, seed: int = 0
) -> list[Diagnosis]:
    """Summarise cases: all heads together, then each head if there are several.

    Args:
        group: of the agents.
        pooling: name of the head.
        observed: what was measured.
        cases: the measures.
        seed: of the bootstrap.
    """
    variance, within = theory.variance(cases.transitions)
    known: dict[str, Any] = {
        "group": group,
        "pooling": pooling,
        "heads": cases.numbers["excess"].shape[1],
        "episodes": len(observed.episodes.unique()),
        "observations": len(observed.episodes),
        "num_tokens": _mean(cases.transitions.num_tokens),
        "num_signal": _mean(cases.num_signal.double()),
        "uniform_weight": _mean(cases.num_signal / cases.transitions.num_tokens),
        "variance": float(variance),
        "within": float(within),
    }
    rows = []
    for head in (None, *range(known["heads"] if known["heads"] > 1 else 0)):
        chosen = slice(None) if head is None else slice(head, head + 1)
        numbers = {key: value[:, chosen] for key, value in cases.numbers.items()}
        for key in ("signal_loss", "excess", "mean_excess"):
            numbers[key] = numbers[key] / variance
        summary = _summary(numbers, observed.episodes, seed)
        name = ALL if head is None else str(head)
        rows.append(Diagnosis(head=name, **known, **summary))
    return rows


def _summary(
    numbers: Mapping[str, Tensor], episodes: Tensor, seed: int
) -> dict[str, Any]:
    counts = ("checked", "violations")
    made: dict[str, Any] = {
        key: _mean(value) for key, value in numbers.items() if key not in counts
    }
    excess = numbers["excess"].mean(1)
    made |= zip(
        ("excess_low", "excess_high"),
        _interval(excess, episodes, seed),
        strict=True,
    )
    if "margin" in numbers:
        margin = numbers["margin"]
        known = margin[~margin.isnan()]
        made["margin_positive"] = _mean((known > 0).double())
        for kind in ("signal", "noise"):
            width = numbers[f"{kind}_high"] - numbers[f"{kind}_low"]
            made[f"{kind}_bound_width"] = _mean(width)
        made |= {key: int(numbers[key].sum()) for key in counts}
    return made


def _mean(values: Tensor) -> float:
    """Of those that are defined; NaN if none is."""
    return float(values.double().nanmean())


def _interval(values: Tensor, episodes: Tensor, seed: int) -> tuple[float, float]:
    """Of the mean of ``(B,)`` values, if whole episodes are drawn anew."""
    defined = ~values.isnan()
    if not defined.any():
        return NAN, NAN
    _, place = episodes[defined].unique(return_inverse=True)
    count = place.bincount()
    summed = torch.zeros_like(count, dtype=torch.float64)
    total = summed.index_add(0, place, values[defined]).cpu().numpy()
    counts = count.cpu().numpy()

    def mean(drawn: np.ndarray) -> np.ndarray:
        chosen = drawn.astype(int)
        means: np.ndarray = total[chosen].sum(-1) / counts[chosen].sum(-1)
        return means

    _, low, high = bootstrap(np.arange(len(counts)), mean, seed=seed)
    return low, high
