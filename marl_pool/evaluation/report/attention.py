"""Attention of the policies: entropy, and total weight of each type of token."""

from collections.abc import Sequence
from typing import NamedTuple

import pandas as pd
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from marl_pool.evaluation.loading import EvaluationTarget
from marl_pool.evaluation.report import html
from marl_pool.evaluation.report.methods import Method
from marl_pool.evaluation.report.runs import Loaded, with_trained
from marl_pool.rollout import Rollout
from marl_pool.tokens import Tokens, TokenSpec

NUM_ENVS = 16
STEPS = 64
ENTROPY, ALL_SIGNAL = "entropy", "all signal"
"""Columns of the entropy, and of all types of signal tokens together, self included."""
NO_WEIGHTS = "its pooling head has no attention weights"
NO_TOKENS = "its environment has no such tokens"


class AttentionSummary(NamedTuple):
    """Unperturbed attention of one run, averaged over steps, agents and heads.

    Attributes:
        entropy: of the weights, divided by that of uniform weights, in [0, 1].
        weights: total weight by type of token, and of all signal where it is known.
        uniform: the same for uniform weights.
    """

    entropy: float
    weights: dict[str, float]
    uniform: dict[str, float]


def attention_summary(subject: EvaluationTarget, group: str) -> AttentionSummary | None:
    """Play short episodes and average the attention of a group's active agents.

    Returns:
        None if the policy's pooling head has no attention weights.
    """
    # Play, and flatten steps and environments to one batch.
    env = subject.make_env(NUM_ENVS)
    spec = env.groups[group].tokens
    played = Rollout(env, subject.policies).steps(min(STEPS, env.max_steps))[group]
    tokens = played.tokens.map(lambda tensor: tensor.flatten(0, 1))
    states = tree_map(lambda tensor: tensor.flatten(0, 1), played.states)
    with torch.no_grad():
        weights = subject.policies[group].attention_weights(tokens, states)
    if weights is None:
        return None
    active = played.active.flatten(0, 1)
    return _averaged(weights[active], tokens.at(active), spec)


def _averaged(weights: Tensor, tokens: Tokens, spec: TokenSpec) -> AttentionSummary:
    present = ~tokens.padding
    count = present.sum(-1)
    # The entropy of a single token is 0 and cannot be normalized.
    several = count > 1
    entropy = torch.special.entr(weights).sum(-1).mean(-1)
    evenness = (entropy / count.log())[several]
    # Compute the total weight of each type of token.
    types = {
        name: (tokens.types == place) & present
        for place, name in enumerate(spec.type_names)
    }
    if spec.signal_types:
        signal = torch.stack([types[name] for name in spec.signal_types])
        types[ALL_SIGNAL] = signal.any(0)
    # Uniform weights serve as the reference.
    uniform = present / count.clamp(min=1)[..., None]
    by_head = weights.mean(-2)

    def totals(weights: Tensor) -> dict[str, float]:
        return {
            name: float((weights * mask).sum(-1).mean()) for name, mask in types.items()
        }

    return AttentionSummary(float(evenness.mean()), totals(by_head), totals(uniform))


def attention(
    methods: Sequence[Method], loaded: Loaded, group: str
) -> html.PageSection:
    """Build the table of entropies and weights."""
    facts = {"envs": NUM_ENVS, "steps": STEPS}
    # One row per run and number, with the number for uniform weights.
    rows: list[tuple[str, str, str, float, float]] = []
    reasons: dict[str, str] = {}
    for method in methods:
        for one in method.runs:
            subject = with_trained(loaded[one.run.path], group)
            if isinstance(subject, str):
                reasons[method.name] = subject
            elif (own := attention_summary(subject, group)) is None:
                reasons[method.name] = NO_WEIGHTS
            else:
                source = f"{one.name}, checkpoint {subject.name}, {NUM_ENVS} envs of "
                key = (method.name, f"{source}seed {subject.seed}, {STEPS} steps")
                rows.append((*key, ENTROPY, own.entropy, 1.0))
                rows += [
                    (*key, kind, weight, own.uniform[kind])
                    for kind, weight in own.weights.items()
                ]
    # Give the reasons if no method has attention weights.
    if not rows:
        notes = [f"{method.name}: {reasons[method.name]}" for method in methods]
        note = html.missing_note(f"{'; '.join(notes)}.")
        return html.PageSection("attention", [note], facts)
    names = ["method", "source", "column", "value", "uniform"]
    frame = pd.DataFrame(rows, columns=names)
    parts = dict(iter(frame.groupby(["method", "column"])))
    # Make a row of the table for each method.
    records = []
    for name in (method.name for method in methods):
        records.append({"method": html.Cell(name)})
        # Types that no set contains have no column.
        for column in frame["column"][frame["uniform"] > 0].unique():
            part, reason = parts.get((name, column)), reasons.get(name, NO_TOKENS)
            known = part is not None and name not in reasons
            cell = _cell(column, part) if known else html.missing(reason)
            records[-1][column] = cell
    return html.PageSection("attention", [pd.DataFrame(records)], facts)


def _cell(column: str, runs: pd.DataFrame) -> html.Cell:
    """The mean of an entropy or a weight over runs, with that of each run."""
    write = html.number if column == ENTROPY else "{:.0%}".format
    values = zip(runs["source"], runs["value"], strict=True)
    title = "; ".join(f"{source}: {write(value)}" for source, value in values)
    text, uniform = write(runs["value"].mean()), write(runs["uniform"].mean())
    if column == ENTROPY:
        return html.Cell(text, title)
    return html.Cell(text, f"{title}; uniform weights: {uniform}", small=uniform)
