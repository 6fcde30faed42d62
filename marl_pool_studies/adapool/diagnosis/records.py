"""Records of a diagnosis, one per group and attention head, as data and as a table."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
from torch import Tensor

from marl_pool.evaluation.results import NAN
from marl_pool.evaluation.statistics.intervals import bootstrap
from marl_pool.files import tables
from marl_pool.utils.text import printable
from marl_pool_studies.adapool.diagnosis import theory
from marl_pool_studies.adapool.diagnosis.measures import GroupObservations, HeadMeasures

ALL = "all"
"""``head`` of the record of all attention heads together."""
COMMON = {
    "k of N": "{num_signal:.3g} of {num_tokens:.3g}",
    "loss": "{signal_loss:.3f}",
    "excess": "{excess:.3f}",
    "95 %": "{excess_low:.3f} to {excess_high:.3f}",
    "of mean": "{mean_excess:.3f}",
    "w signal": "{signal_weight:.3f}",
    "k/N": "{uniform_weight:.3f}",
    "w self": "{self_weight:.3f}",
}
"""Format of each column."""
SCORED = {
    "ε_s": "{signal_width:.2f}",
    "ε_η": "{noise_width:.2f}",
    "M": "{margin:.2f}",
    "D": "{distance:.2f}",
    "M > 0": "{margin_positive:.0%}",
    "U_s-L_s": "{signal_bound_width:.3f}",
    "U_η-L_η": "{noise_bound_width:.3f}",
    "outside": "{violations} of {checked:,}",
}
"""Columns of heads with relation scores."""


@dataclass(frozen=True)
class Diagnosis:
    """Signal loss, relation scores and weight bounds of one attention head.

    Numbers are means over observations (and heads). Losses are divided by
    ``variance``. Undefined numbers are NaN: those from ``signal_width`` on for heads
    without relation scores, and comparisons of signal and noise for sets without noise.

    Source: Brothers (2025), https://arxiv.org/abs/2506.09215; see `theory`.
    """

    group: str
    pooling: str
    head: str
    """Number of an attention head, or `ALL`; heads of MaxPooling are features."""
    heads: int = 0
    episodes: int = 0
    observations: int = 0
    num_tokens: float = NAN
    """N."""
    num_signal: float = NAN
    """k."""
    variance: float = NAN
    """Variance of the encoder's outputs over all sets, averaged over features."""
    within: float = NAN
    """Fraction of the variance within sets; the rest is between the sets' means."""
    signal_loss: float = NAN
    """Definition 3.2."""
    excess: float = NAN
    """‖x_c - mean(X_s)‖²/d, the avoidable part of the signal loss."""
    excess_low: float = NAN
    """95 % percentile bootstrap interval over episodes, for this policy only; NaN for
    fewer than two episodes."""
    excess_high: float = NAN
    mean_excess: float = NAN
    """Excess of average pooling on the same vectors."""
    signal_weight: float = NAN
    """Total attention weight of the signal tokens."""
    uniform_weight: float = NAN
    """k/N, the signal's weight under equal weights."""
    self_weight: float = NAN
    """Weight of the agent's own token, which is signal."""
    signal_width: float = NAN
    """ε_s, equation 8."""
    noise_width: float = NAN
    """ε_η, equation 8."""
    margin: float = NAN
    """M, equation 9."""
    distance: float = NAN
    """D, equation 9."""
    margin_positive: float = NAN
    """Fraction of defined margins with M > 0."""
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
    """U_s - L_s; vacuous from 1 on."""
    noise_bound_width: float = NAN
    """U_η - L_η; vacuous from 1 on."""
    checked: int = 0
    """Number of weights compared with their bounds."""
    violations: int = 0
    """Number of weights outside their bounds."""
    missing: str = ""
    """Reason why there are no numbers; empty otherwise."""


Named = Sequence[tuple[str, Diagnosis]]
"""Diagnoses with their names in tables and figures."""


def summarize(
    group: str,
    pooling: str,
    observations: GroupObservations,
    measures: HeadMeasures,
    seed: int = 0,
) -> list[Diagnosis]:
    """Summarize measures over all heads, and over each head if there are several."""
    variance, within = theory.variance(measures.moments)
    common: dict[str, Any] = {
        "group": group,
        "pooling": pooling,
        "heads": measures.numbers["excess"].shape[1],
        "episodes": len(observations.episodes.unique()),
        "observations": len(observations.episodes),
        "num_tokens": _mean(measures.moments.num_tokens),
        "num_signal": _mean(measures.num_signal.double()),
        "uniform_weight": _mean(measures.num_signal / measures.moments.num_tokens),
        "variance": float(variance),
        "within": float(within),
    }
    rows = []
    for head in (None, *range(common["heads"] if common["heads"] > 1 else 0)):
        columns = slice(None) if head is None else slice(head, head + 1)
        numbers = {key: value[:, columns] for key, value in measures.numbers.items()}
        # Losses in units of the variance.
        for key in ("signal_loss", "excess", "mean_excess"):
            numbers[key] = numbers[key] / variance
        summary = _summary(numbers, observations.episodes, seed)
        name = ALL if head is None else str(head)
        rows.append(Diagnosis(head=name, **common, **summary))
    return rows


def _summary(
    numbers: Mapping[str, Tensor], episodes: Tensor, seed: int
) -> dict[str, Any]:
    counts = ("checked", "violations")
    summary: dict[str, Any] = {
        key: _mean(value) for key, value in numbers.items() if key not in counts
    }
    # The interval is of the mean over heads.
    low, high = _interval(numbers["excess"].mean(1), episodes, seed)
    summary |= {"excess_low": low, "excess_high": high}
    if "margin" in numbers:
        margin = numbers["margin"]
        summary["margin_positive"] = _mean((margin[~margin.isnan()] > 0).double())
        # Widths of the bounds, and counts of the weights that violate them.
        for kind in ("signal", "noise"):
            width = numbers[f"{kind}_high"] - numbers[f"{kind}_low"]
            summary[f"{kind}_bound_width"] = _mean(width)
        summary |= {key: int(numbers[key].sum()) for key in counts}
    return summary


def _mean(values: Tensor) -> float:
    """Mean of the defined values; NaN without any."""
    return float(values.double().nanmean())


def _interval(values: Tensor, episodes: Tensor, seed: int) -> tuple[float, float]:
    """Bootstrap interval of the mean of ``(B,)`` values, resampling whole episodes."""
    # The interval ignores undefined values.
    defined = ~values.isnan()
    if not defined.any():
        return NAN, NAN
    # Sum and count per episode determine the mean of any resample of episodes.
    _, index = np.unique(episodes[defined].cpu(), return_inverse=True)
    counts, totals = np.bincount(index), np.bincount(index, values[defined].cpu())

    def mean(samples: np.ndarray) -> Any:
        rows = samples.astype(int)
        return totals[rows].sum(-1) / counts[rows].sum(-1)

    _, low, high = bootstrap(np.arange(len(counts)), mean, seed=seed)
    return low, high


def to_plain(diagnosis: Diagnosis) -> dict[str, Any]:
    """Convert a diagnosis to plain data, with None for NaN."""
    return tables.without_nan(asdict(diagnosis))


def from_plain(values: Mapping[str, Any]) -> Diagnosis:
    """Invert `to_plain`; other keys are ignored."""
    arguments: dict[str, Any] = {
        f.name: NAN if values[f.name] is None else values[f.name]
        for f in fields(Diagnosis)
    }
    return Diagnosis(**arguments)


def print_table(entries: Named, title: str) -> None:
    """Print diagnoses as a table, and the reasons for missing ones below it."""
    scored = any(row.checked for _, row in entries)
    columns = {**COMMON, **(SCORED if scored else {})}
    lines = []
    for name, row in entries:
        blank = () if row.checked else SCORED
        texts = [
            "" if column in blank else form.format_map(vars(row))
            for column, form in columns.items()
        ]
        cells = ["" if "nan" in text else text for text in texts]
        lines.append([name, *(["not measured"] if row.missing else cells)])
    tables.print_table(["", *columns], lines, title=title, width=200)
    for name, row in entries:
        if row.missing:
            print(f"not measured: {printable(name)}: {row.missing}")
