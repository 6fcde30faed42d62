"""Action spaces and the distributions over them."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from marl_pool.utils.errors import InputError


@dataclass(frozen=True)
class ActionSpec:
    """An action space, Discrete(n) or a bounded Box of one dimension, JSON-ready.

    Attributes:
        n: number of discrete actions; 0 for a Box.
        low: lower bounds of a Box; empty for Discrete.
        high: upper bounds of a Box.
    """

    n: int = 0
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for bound in ("low", "high"):  # lists if read from JSON
            object.__setattr__(self, bound, tuple(getattr(self, bound)))
        if len(self.low) != len(self.high) or (self.n > 0) == (len(self.low) > 0):
            raise InputError(f"action space: expected choices or bounds, got {self}")

    @classmethod
    def of(cls, space: "spaces.Space | ActionSpec") -> "ActionSpec":
        """Convert a Gymnasium space.

        Raises:
            InputError: neither a bounded one-dimensional Box nor a Discrete from 0.
        """
        if isinstance(space, ActionSpec):
            return space
        # Discrete actions are numbered from 0.
        if isinstance(space, spaces.Discrete) and space.start == 0:
            return cls(n=int(space.n))
        if (
            isinstance(space, spaces.Box)
            and len(space.shape) == 1
            and np.isfinite([space.low, space.high]).all()
        ):
            return cls(low=tuple(space.low.tolist()), high=tuple(space.high.tolist()))
        raise InputError(
            "action space: expected Discrete(n) or a bounded Box of one dimension, "
            f"got {space}"
        )

    @property
    def discrete(self) -> bool:
        """True for Discrete, False for a Box."""
        return self.n > 0

    @property
    def num_logits(self) -> int:
        """L: n for Discrete, or a mean and a log-std for each dimension of a Box."""
        return self.n if self.discrete else 2 * len(self.low)

    @property
    def dim(self) -> int:
        """A: the width of an action as a vector; see `to_vectors`."""
        return self.n if self.discrete else len(self.low)

    def to_vectors(self, actions: Tensor) -> Tensor:
        """Convert actions to the vectors ``(*B, A)`` that a recurrent policy receives.

        Discrete actions become one-hot; actions of a Box are clipped to [-1, 1], as the
        environment clips them, in float32: the last bits of a float64 depend on the
        order of the tokens, and would enter the memory.
        """
        if self.discrete:
            choices = torch.arange(self.n, device=actions.device)
            return (actions[..., None] == choices).long()
        return actions.clamp(-1, 1).float()

    @property
    def noise_size(self) -> int:
        """Number of uniform random numbers that one sample consumes."""
        return 1 if self.discrete else len(self.low)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready form that ``ActionSpec(**…)`` accepts."""
        return asdict(self)


def sample(
    spec: ActionSpec, logits: Tensor, noise: Tensor, mask: Tensor | None = None
) -> Tensor:
    """Sample actions, ``(*B, A)`` float or ``(*B,)`` int64, by inverse transform.

    Args:
        spec: action space.
        logits: ``(*B, L)`` parameters of the distributions.
        noise: ``(*B, noise_size)`` uniform in (0, 1).
        mask: that of `mask_logits`, by which ``logits`` were masked.
    """
    if spec.discrete:
        # Count the cumulative probabilities below the noise.
        cumulative = logits.softmax(-1).cumsum(-1)
        below = (cumulative < noise * cumulative[..., -1:]).sum(-1)
        action = below.clamp(max=spec.n - 1)
        if mask is None:
            return action
        # Noise that rounds to 0, and sums that a GPU rounds in another order.
        allowed = mask.gather(-1, action[..., None])[..., 0]
        return torch.where(allowed, action, logits.argmax(-1))
    mean, log_std = logits.chunk(2, dim=-1)
    return mean + log_std.exp() * torch.special.ndtri(noise)


ILLEGAL_LOGIT = -1e9
"""Logit of an action that is not allowed: finite, so that no gradient, entropy or
divergence is NaN, and so small that its probability is exactly 0."""
LOWEST_LOGIT = -1e8
"""Limit of the other logits, so that they stay far above it."""


def mask_logits(logits: Tensor, mask: Tensor | None) -> Tensor:
    """Give actions that are not allowed a probability of 0.

    Args:
        logits: ``(*B, L)`` of discrete actions.
        mask: ``(*B, L)`` bool, True for allowed actions, or None to allow all. A row
            without any is a uniform distribution.
    """
    if mask is None:
        return logits
    return torch.where(mask, logits.clamp(min=LOWEST_LOGIT), ILLEGAL_LOGIT)


def mode(spec: ActionSpec, logits: Tensor) -> Tensor:
    """Return the most likely actions; shapes as in `sample`."""
    return logits.argmax(-1) if spec.discrete else logits.chunk(2, dim=-1)[0]


def log_prob(spec: ActionSpec, logits: Tensor, action: Tensor) -> Tensor:
    """Return the log-probability ``(*B,)`` of ``action``."""
    if spec.discrete:
        return logits.log_softmax(-1).gather(-1, action[..., None])[..., 0]
    mean, log_std = logits.chunk(2, dim=-1)
    squares = ((action - mean) * (-log_std).exp()).square()
    constant = 0.5 * mean.shape[-1] * float(np.log(2 * np.pi))
    return -constant - torch.add(log_std, squares, alpha=0.5).sum(-1)


def entropy(spec: ActionSpec, logits: Tensor) -> Tensor:
    """Return the entropy ``(*B,)`` of the distributions, in nats."""
    if spec.discrete:
        log_probs = logits.log_softmax(-1)
        return -(log_probs.exp() * log_probs).sum(-1)
    _, log_std = logits.chunk(2, dim=-1)
    return log_std.sum(-1) + 0.5 * log_std.shape[-1] * float(1 + np.log(2 * np.pi))


def kl_divergence(spec: ActionSpec, logits: Tensor, other: Tensor) -> Tensor:
    """Return the divergence ``(*B,)`` of ``other`` from ``logits``, in nats."""
    if spec.discrete:
        log_probs = logits.log_softmax(-1)
        return (log_probs.exp() * (log_probs - other.log_softmax(-1))).sum(-1)
    mean, log_std = logits.chunk(2, dim=-1)
    other_mean, other_log_std = other.chunk(2, dim=-1)
    precision = (-2 * other_log_std).exp()
    squares = ((2 * log_std).exp() + (mean - other_mean).square()) * precision
    return (other_log_std - log_std + 0.5 * squares - 0.5).sum(-1)
