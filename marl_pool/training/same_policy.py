"""Comparison of a saved policy with a run's: they may differ in weights only."""

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from marl_pool.policies.base import SpecifiedPolicy
from marl_pool.tokens import Tokens, TokenSpec
from marl_pool.utils.errors import InputError

IGNORED = ("spec", "action_space", "init_std", "key_gain")
"""Options that are compared by `SpecifiedPolicy.mismatch`, or matter only at first."""
TRIAL_SETS = 16
"""Sets of tokens on which a saved policy and the run's are compared."""


def validate_same(saved: SpecifiedPolicy, policy: SpecifiedPolicy, source: str) -> None:
    """Reject a saved policy that is not a run's policy with other weights.

    Args:
        saved: in eval mode.
        policy: the run's, in eval mode; it is not changed.
        source: names the saved policy in errors.

    Raises:
        InputError: class, options, tokens, actions, or names or shapes of weights
            differ, or other outputs are computed with the same weights.
    """
    if type(saved) is not type(policy):
        raise InputError(
            f"expected a {type(policy).__name__}, {source} is a {type(saved).__name__}"
        )
    if differences := "; ".join(_differences(policy.config, saved.config)):
        raise InputError(f"{source} has other options: expected {differences}")
    if reason := saved.mismatch(policy.spec, policy.actions):
        raise InputError(f"{source} does not fit the group: {reason}")
    shapes = {name: tuple(tensor.shape) for name, tensor in policy.state_dict().items()}
    for name, tensor in saved.state_dict().items():
        shape = shapes.pop(name, None)
        if shape != tuple(tensor.shape):
            raise InputError(
                f"{source} has a different {name} from the run's policy: expected "
                f"{'none' if shape is None else shape}, got {tuple(tensor.shape)}"
            )
    if shapes:
        raise InputError(f"{source} has no {next(iter(shapes))}")
    # Options that only one of the two names may still differ.
    twin = copy.deepcopy(policy)
    twin.load_state_dict(saved.state_dict())
    tokens = _trial_tokens(saved.spec)
    pairs = zip(_outputs(saved, tokens), _outputs(twin, tokens), strict=True)
    if not all(torch.allclose(*pair, 1e-6, 0.0, equal_nan=True) for pair in pairs):
        raise InputError(f"{source} computes other outputs with the same weights")


def _differences(
    expected: Mapping[str, Any], actual: Mapping[str, Any], path: str = ""
) -> Iterator[str]:
    """Yield the options with different values in two policies, by key."""
    for key, value in expected.items():
        if key not in actual or key in IGNORED:
            continue
        if isinstance(value, Mapping) and isinstance(actual[key], Mapping):
            yield from _differences(value, actual[key], f"{key}.")
        elif actual[key] != value:
            yield f"{path or 'policy.'}{key} = {value}, got {actual[key]}"


@torch.no_grad()
def _outputs(policy: SpecifiedPolicy, tokens: Tokens) -> tuple[Tensor, Tensor]:
    """Return the logits and values of random sets, one for each environment."""
    exact = copy.deepcopy(policy).cpu().double()
    state = exact.initial_state(TRIAL_SETS, 1, tokens.num_tokens)
    decision = exact.act(tokens, state)
    return decision.logits, decision.value


def _trial_tokens(spec: TokenSpec) -> Tokens:
    """Return random tokens ``(TRIAL_SETS, 1, N)``, with a self token if specified."""
    generator = torch.Generator().manual_seed(0)
    shape = (TRIAL_SETS, 1, spec.num_tokens)
    numbers = (*shape, spec.num_features)
    features = torch.rand(numbers, dtype=torch.float64, generator=generator)
    if spec.dtype == "uint8":
        features = (255 * features).to(torch.uint8)
    types = torch.randint(spec.num_types, shape, generator=generator)
    if spec.has_self:
        types = types.clamp(min=min(1, spec.num_types - 1))
        types[..., 0] = 0
    return Tokens(features, types, torch.zeros(shape, dtype=torch.bool))
