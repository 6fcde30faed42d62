"""Attention of the policies: entropy of the weights, and shares of token types."""

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
from marl_pool.evaluation.report.loading import Loaded, load_problem
from marl_pool.evaluation.report.methods import Method
from marl_pool.rollout import Rollout
from marl_pool.tokens import Tokens, TokenSpec

WORLDS = 16
STEPS = 64
ALL_SIGNAL = "all signal"
"""All types that matter for the task together, self among them."""
NO_WEIGHTS = "its pooling head has no attention weights"


class AttentionShares(NamedTuple):
    """Unperturbed attention of one run, as means over steps, agents and heads.

    Attributes:
        entropy: of the weights over that of equal ones, in [0, 1].
        shares: of the weight, by type of token, and of all signal where it is known.
        equal: the shares of equal weights.
    """

    entropy: float
    shares: dict[str, float]
    equal: dict[str, float]


def attention_shares(subject: EvaluationTarget, group: str) -> AttentionShares | None:
    """Play short episodes and average the attention of a group's policy.

    Returns:
        None if its pooling head has no weights. Dead agents are left out.
    """
    # Play, and flatten steps and environments to one batch.
    env = subject.make_env(WORLDS)
    spec = env.groups[group].tokens
    played = Rollout(env, subject.policies).steps(min(STEPS, env.max_steps))[group]
    tokens = played.tokens.map(lambda tensor: tensor.flatten(0, 1))
    states = tree_map(lambda tensor: tensor.flatten(0, 1), played.states)
    with torch.no_grad():
        weights = subject.policies[group].weights(tokens, states)
    if weights is None:
        return None
    living = played.active.flatten(0, 1)
    return _averaged(weights[living], tokens.at(living), spec)


def _averaged(weights: Tensor, tokens: Tokens, spec: TokenSpec) -> AttentionShares:
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
    equal = present / count.clamp(min=1)[..., None]
    mean = weights.mean(-2)
    return AttentionShares(
        float(evenness.mean()) if several.any() else float("nan"),
        {name: _share(mean, mask) for name, mask in types.items()},
        {name: _share(equal, mask) for name, mask in types.items()},
    )


def _share(weights: Tensor, mask: Tensor) -> float:
    return float((weights * mask).sum(-1).mean())


def attention(methods: Sequence[Method], loaded: Loaded, group: str) -> PageSection:
    """Build the table of entropies and shares."""
    facts = {"worlds": WORLDS, "steps": STEPS}
    found = {method.name: _of_method(method, loaded, group) for method in methods}
    shown = [one for seeds, _ in found.values() for one in seeds.values()]
    if not shown:
        reasons = dict.fromkeys(f"{name}: {why}" for name, (_, why) in found.items())
        note = Note("; ".join(reasons) + ".", missing=True)
        return PageSection("attention", [note], facts)
    types = list(
        dict.fromkeys(
            name for one in shown for name, share in one.equal.items() if share
        )
    )
    lines = [_line(name, *own, types) for name, own in found.items()]
    table = Table(["method", "entropy", *types], lines)
    return PageSection("attention", [table], facts)


def _of_method(
    method: Method, loaded: Loaded, group: str
) -> tuple[dict[str, AttentionShares], str]:
    """The attention of each run by its provenance; why one is missing, if one is."""
    found, why = {}, ""
    for one in method.runs:
        subject = loaded[one.run.path]
        problem = load_problem(subject, group)
        if problem or isinstance(subject, str):
            why = problem
            continue
        shares = attention_shares(subject, group)
        if shares is None:
            why = NO_WEIGHTS
            continue
        source = (
            f"{one.name}, checkpoint {subject.name}, {WORLDS} worlds of seed "
            f"{subject.seed}, {STEPS} steps"
        )
        found[source] = shares
    return found, why


def _line(
    name: str, seeds: Mapping[str, AttentionShares], why: str, types: Sequence[str]
) -> list[TableCell]:
    if why or not seeds:
        return [TableCell(name), *[missing(why)] * (len(types) + 1)]
    mean = float(np.mean([one.entropy for one in seeds.values()]))
    each = (f"{source}: {number(one.entropy)}" for source, one in seeds.items())
    line = [TableCell(name), TableCell(number(mean), "; ".join(each))]
    for kind in types:
        shares = {source: one.shares.get(kind, 0.0) for source, one in seeds.items()}
        equal = float(np.mean([one.equal.get(kind, 0.0) for one in seeds.values()]))
        each = (f"{source}: {share:.0%}" for source, share in shares.items())
        title = f"{'; '.join(each)}; equal weights: {equal:.0%}"
        text = f"{float(np.mean(list(shares.values()))):.0%}"
        line.append(TableCell(text, title, small=f"{equal:.0%}"))
    return line
