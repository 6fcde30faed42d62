"""Attention of the policies: entropy, and total weight of each type of token."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from marl_pool.evaluation.loading import EvaluationTarget
from marl_pool.evaluation.report.components import (
    Note,
    PageSection,
    Table,
    TableCell,
    missing,
    number,
)
from marl_pool.evaluation.report.methods import Method
from marl_pool.evaluation.report.runs import Loaded, load_problem
from marl_pool.rollout import Rollout
from marl_pool.tokens import Tokens, TokenSpec

NUM_ENVS = 16
STEPS = 64
ALL_SIGNAL = "all signal"
"""Column of all types of signal tokens together, self included."""
NO_WEIGHTS = "its pooling head has no attention weights"


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
    entropy = torch.special.entr(weights).sum(-1).mean(-1)
    several = count > 1
    evenness = entropy[several] / count[several].log()
    types = {
        name: (tokens.types == place) & present
        for place, name in enumerate(spec.type_names)
    }
    if spec.signal_types:
        signal = torch.stack([types[name] for name in spec.signal_types])
        types[ALL_SIGNAL] = signal.any(0)
    uniform = present / count.clamp(min=1)[..., None]
    mean = weights.mean(-2)
    return AttentionSummary(
        float(evenness.mean()) if several.any() else float("nan"),
        {name: _total(mean, mask) for name, mask in types.items()},
        {name: _total(uniform, mask) for name, mask in types.items()},
    )


def _total(weights: Tensor, mask: Tensor) -> float:
    return float((weights * mask).sum(-1).mean())


def attention(methods: Sequence[Method], loaded: Loaded, group: str) -> PageSection:
    """Build the table of entropies and weights."""
    facts = {"envs": NUM_ENVS, "steps": STEPS}
    found = {method.name: _of_method(method, loaded, group) for method in methods}
    shown = [one for seeds, _ in found.values() for one in seeds.values()]
    if not shown:
        reasons = dict.fromkeys(f"{name}: {why}" for name, (_, why) in found.items())
        note = Note("; ".join(reasons) + ".", missing=True)
        return PageSection("attention", [note], facts)
    types = list(
        dict.fromkeys(
            name for one in shown for name, weight in one.uniform.items() if weight
        )
    )
    lines = [_line(name, *own, types) for name, own in found.items()]
    table = Table(["method", "entropy", *types], lines)
    return PageSection("attention", [table], facts)


def _of_method(
    method: Method, loaded: Loaded, group: str
) -> tuple[dict[str, AttentionSummary], str]:
    """The attention of each run by its provenance, and the reason if one is missing."""
    found, why = {}, ""
    for one in method.runs:
        subject = loaded[one.run.path]
        problem = load_problem(subject, group)
        if problem or isinstance(subject, str):
            why = problem
            continue
        summary = attention_summary(subject, group)
        if summary is None:
            why = NO_WEIGHTS
            continue
        source = (
            f"{one.name}, checkpoint {subject.name}, {NUM_ENVS} envs of seed "
            f"{subject.seed}, {STEPS} steps"
        )
        found[source] = summary
    return found, why


def _line(
    name: str, seeds: Mapping[str, AttentionSummary], why: str, types: Sequence[str]
) -> list[TableCell]:
    if why or not seeds:
        return [TableCell(name), *[missing(why)] * (len(types) + 1)]
    mean = float(np.mean([one.entropy for one in seeds.values()]))
    each = (f"{source}: {number(one.entropy)}" for source, one in seeds.items())
    line = [TableCell(name), TableCell(number(mean), "; ".join(each))]
    for kind in types:
        weights = {source: one.weights.get(kind, 0.0) for source, one in seeds.items()}
        uniform = float(np.mean([one.uniform.get(kind, 0.0) for one in seeds.values()]))
        each = (f"{source}: {weight:.0%}" for source, weight in weights.items())
        title = f"{'; '.join(each)}; uniform weights: {uniform:.0%}"
        text = f"{float(np.mean(list(weights.values()))):.0%}"
        line.append(TableCell(text, title, small=f"{uniform:.0%}"))
    return line
