"""Detection of NaN and infinity in what policies observe, decide and receive."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from marl_pool.tokens import Tokens
from marl_pool.utils.errors import InputError
from marl_pool.utils.randomness import place_in_batch


class NonFiniteError(InputError):
    """A number of an environment, a policy or a perturbation is NaN or infinite."""


def validate_finite(
    group: str,
    tokens: Tokens | None = None,
    logits: Tensor | None = None,
    rewards: Tensor | None = None,
    *,
    states: Tokens | None = None,
    env_ids: Tensor,
    first_steps: Tensor | None = None,
    playing: Tensor | None = None,
) -> None:
    """Raise `NonFiniteError` for NaN and infinite numbers, padding aside.

    Args:
        group: the agents' group, for the message.
        tokens: observations ``(T, num_envs, agents)``, perturbed.
        logits: parameters of the action distributions ``(T, num_envs, agents, L)``.
        rewards: ``(T, num_envs, agents)``. Parts that are None are not checked.
        states: what critics read, ``(T, num_envs, agents)``.
        env_ids: ``(num_envs,)`` numbers of the environments, for the message.
        first_steps: ``(T, num_envs)`` numbers of the steps in their episodes, or
            ``(num_envs,)`` if T is 1, for the message; None for 0, 1, … A reward
            belongs to the step after its observation.
        playing: ``(num_envs,)`` bool, environments to check; None for all.
    """
    pairs = ("observations", tokens), ("states", states)
    sets = {kind: part for kind, part in pairs if part is not None}
    numbers = {kind: part.features for kind, part in sets.items()}
    parts = {"action logits": logits, "rewards": rewards}
    numbers |= {kind: part for kind, part in parts.items() if part is not None}
    if not _may_be_bad(numbers.values()):
        return
    for kind, part in sets.items():
        numbers[kind] = part.features.masked_fill(part.padding[..., None], 0)
    masks = {kind: _bad(part) for kind, part in numbers.items()}
    if playing is not None:
        masks = {kind: mask & playing[:, None] for kind, mask in masks.items()}
    counts = {kind: int(mask.sum()) for kind, mask in masks.items() if mask.any()}
    if counts:
        firsts = {kind: masks[kind].nonzero()[0].tolist() for kind in counts}
        # A reward belongs to the step after its observation. Of equal steps the first
        # kind, which the others follow from.
        kind = min(firsts, key=lambda kind: firsts[kind][0] + (kind == "rewards"))
        step, row, agent = firsts[kind]
        summary = ", ".join(
            f"{kind} of {count} steps" for kind, count in counts.items()
        )
        if first_steps is not None:
            step = int(first_steps.view(-1, len(env_ids))[step, row])
        step += kind == "rewards"
        raise NonFiniteError(
            f"NaN or infinite: {summary}; first: {kind} of agent {agent} of group "
            f"{group!r} in environment {place_in_batch(int(env_ids[row]))} at step "
            f"{step}"
        )


def require_numbers(outputs: Tensor) -> None:
    """Raise `NonFiniteError` if a network's outputs for an observation contain NaN."""
    if outputs.isnan().any():
        raise NonFiniteError(
            "observation: expected finite numbers, got some for which the network's "
            "outputs are NaN"
        )


def _bad(numbers: Tensor) -> Tensor:
    """Return ``(T, num_envs, agents)`` bool: a number is NaN or infinite."""
    bad = ~torch.isfinite(numbers)
    return bad.flatten(3).any(-1) if bad.dim() > 3 else bad


def _may_be_bad(parts: Iterable[Tensor]) -> bool:
    # NaN and infinity carry over to the sum, which costs far less than a test of each
    # number; a sum of finite numbers may overflow too. Bytes are always finite.
    sums = [part.sum() for part in parts if part.is_floating_point()]
    return not math.isfinite(float(sum(sums)))  # one read
