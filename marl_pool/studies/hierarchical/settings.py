"""Settings of a hierarchical transformer's encoder and decoder."""

from dataclasses import dataclass
from typing import Literal

from marl_pool.encoders.merging import MergingPolicy
from marl_pool.kernels.attention import validate_heads
from marl_pool.utils.errors import InputError
from marl_pool.utils.types import NonNegativeFloat, PositiveInt, Probability

LogProb = Literal["masked", "unmasked"]
Gradient = Literal["reinforce", "scaling"]


@dataclass(kw_only=True, eq=False)
class Hierarchy:
    """Settings of a hierarchical transformer.

    Source: Nair and Lieck, section 3 and Table 3, whose values are the defaults, except
    their dropout of 0.1. Hidden widths, not published, are four times a token's width.

    Raises:
        InputError: contradictory settings.
    """

    dim: PositiveInt = 256
    """Width of a token."""
    num_heads: PositiveInt = 8
    """Attention heads, a divisor of ``dim``."""
    policy_heads: PositiveInt = 1
    """Heads of the merging policy, a divisor of ``dim``."""
    dropout: Probability = 0.0
    """Dropout probability in the feed-forward parts."""
    policy: MergingPolicy = "learned"
    """Choice of the pairs to merge; see `MergingLayer`."""
    attention: bool = True
    """Use transformer blocks and cross-attention."""
    log_prob: LogProb = "masked"
    """masked: probability of the sampling procedure; unmasked: the paper's."""
    gradient: Gradient = "reinforce"
    """Gradient of the choices: reinforce, or scaling by probabilities (A.4)."""
    through_tokens: bool = False
    """Propagate the score's gradient into the tokens that the policy observes."""
    token_noise: NonNegativeFloat = 0.0
    """Standard deviation of noise on a layer's input tokens, in training (3.2.1)."""

    def __post_init__(self) -> None:
        # Attention splits the width among its heads.
        for name in ("num_heads", "policy_heads"):
            validate_heads(f"task.{name}", getattr(self, name), self.dim)
        # These policies read the keys of the attention.
        if not self.attention and self.policy in ("shared_keys", "heuristic"):
            raise InputError(
                f"task.policy: expected learned or random without attention, "
                f"got {self.policy}"
            )
        # Scaling multiplies by a probability, which only these policies learn.
        if self.is_scaled and self.policy not in ("learned", "shared_keys"):
            raise InputError(
                "task.gradient: expected reinforce with a policy that is not learned, "
                f"got scaling with {self.policy}"
            )

    @property
    def is_masked(self) -> bool:
        """True if log-probabilities are those of the sampling procedure."""
        return self.log_prob == "masked"

    @property
    def is_scaled(self) -> bool:
        """True if outputs are scaled by the probabilities of the choices."""
        return self.gradient == "scaling"
