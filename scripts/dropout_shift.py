"""Measure what the shift by dropout in the learner depends on, at the initial weights.

    python scripts/dropout_shift.py --out docs/images/dropout_shift.png

The network of AdaPool's simple centroid, 10 seeds of its initial weights, 256
observations each. One factor varies at a time: the number of tokens, the rate, and the
place of the dropout. The shift is the mean over the features of the learner's pooled
vector minus the sampler's; the KL is of the learner's policy from the sampler's.
"""

from argparse import ArgumentParser
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import torch
from markdown_tables import markdown_table
from study_arguments import new_file, reported
from torch import Tensor
from torch.nn import functional

from marl_pool.envs import make_batched_env
from marl_pool.files.figures import (
    figure_style,
    legend_below,
    line_styles,
    new_figure,
    save_png,
    style_axes,
)
from marl_pool.policies.actions import kl_divergence
from marl_pool.policies.token_policy import TokenPolicy, pooled_of

HEADS = ("max", "cls", "ada", "avg")
SEEDS = range(10)
NUM_ENVS = 256
FEED_FORWARD, ATTENTION, POOLED = "feed-forward", "attention", "pooled vector"
SAMPLER_TOO = "sampler too"
"""Dropout in the feed-forward parts of both, with independent masks."""
ENCODER = {
    "name": "transformer",
    "dim": 8,
    "num_layers": 3,
    "num_heads": 8,
    "dim_ff": 32,
}


class Condition(NamedTuple):
    """A dropout in the learner; the default is the paper's."""

    tokens: int = 32
    rate: float = 0.1
    place: str = FEED_FORWARD


FACTORS: dict[str, list[Condition]] = {
    "tokens": [Condition(tokens=number) for number in (8, 32, 128)],
    "rate": [Condition(rate=rate) for rate in (0.02, 0.05, 0.1, 0.2)],
    "place": [
        Condition(place=place)
        for place in (FEED_FORWARD, ATTENTION, POOLED, SAMPLER_TOO)
    ],
}
"""Conditions that differ in one factor, by its name."""


@torch.no_grad()
def compare(head: str, condition: Condition, seed: int) -> Tensor:
    """Return the shift of the pooled vector and the KL, ``(2,)``."""
    counts = f"1-3-{condition.tokens - 4}"
    env = make_batched_env("simple_centroid", NUM_ENVS, counts=counts, seed=seed)
    env.reset()
    tokens, group = env.observe()["agent"], env.groups["agent"]
    rate = condition.rate
    in_attention = rate if condition.place == ATTENTION else 0.0
    policy = TokenPolicy(
        group.tokens,
        group.action_space,
        encoder={**ENCODER, "attention_dropout": in_attention},
        pooling={"name": head},
        dropout=rate if condition.place in (FEED_FORWARD, SAMPLER_TOO) else 0.0,
        seed=seed,
    )
    torch.manual_seed(seed)

    def pool(*, training: bool) -> Tensor:
        for_action, _ = policy.train(training).pool(tokens.flatten_batch())
        vectors = pooled_of(for_action)
        if training and condition.place == POOLED:
            vectors = functional.dropout(vectors, rate)
        return vectors

    sampled = pool(training=condition.place == SAMPLER_TOO)
    learned = pool(training=True)
    logits = map(policy.logits, (sampled, learned))
    kl = kl_divergence(group.actions, *logits).mean()
    return torch.stack([(learned - sampled).mean(), kl])


def measure() -> dict[tuple[str, Condition], Tensor]:
    """Return the means over seeds of `compare`, by head and condition."""
    conditions = dict.fromkeys(chain(*FACTORS.values()))
    return {
        (head, condition): torch.stack(
            [compare(head, condition, seed) for seed in SEEDS]
        ).mean(0)
        for condition in conditions
        for head in HEADS
    }


def table(measured: dict[tuple[str, Condition], Tensor]) -> str:
    """Format a row for each condition."""
    rows = []
    for condition in dict.fromkeys(condition for _, condition in measured):
        values = [measured[head, condition] for head in HEADS]
        cells = [f"{float(shift):+.3f}, {float(kl):.3f}" for shift, kl in values]
        rows.append([*condition, *cells])
    return markdown_table(["tokens", "rate", "place", *HEADS], rows)


@figure_style()
def draw(measured: dict[tuple[str, Condition], Tensor], out: Path) -> None:
    """Plot the shift and the KL against each factor."""
    styles = line_styles(HEADS)
    figure = new_figure(10, 5)
    grid = figure.subplots(2, len(FACTORS), sharey="row", sharex="col")
    for column, (factor, conditions) in zip(grid.T, FACTORS.items(), strict=True):
        places = [str(getattr(condition, factor)) for condition in conditions]
        for head in HEADS:
            values = torch.stack([measured[head, c] for c in conditions]).numpy()
            style = styles[head]
            look = {"color": style.color, "marker": style.marker, "label": head}
            for axes, numbers in zip(column, values.T, strict=True):
                axes.plot(
                    places, numbers, linestyle="" if factor == "place" else "-", **look
                )
        for axes in column:
            style_axes(axes)
        column[1].set_xlabel(factor)
    grid[0, 0].set_ylabel("shift of the pooled vector")
    grid[1, 0].set_ylabel("KL, nats")
    legend_below(figure, *grid[0, 0].get_legend_handles_labels())
    save_png(figure, out, 110)


def main() -> None:
    """Measure, print the table, and draw."""
    parser = ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=new_file, help="picture to write")
    arguments = parser.parse_args()
    with reported(parser):
        measured = measure()
        print(table(measured))
        if arguments.out is not None:
            draw(measured, arguments.out)


if __name__ == "__main__":
    main()
