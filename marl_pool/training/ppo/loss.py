"""PPO's loss of one module."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from ray.rllib.algorithms.ppo.ppo import LEARNER_RESULTS_KL_KEY, PPOConfig
from ray.rllib.core.columns import Columns
from ray.rllib.core.learner.learner import ENTROPY_KEY, POLICY_LOSS_KEY, VF_LOSS_KEY
from ray.rllib.evaluation.postprocessing import Postprocessing
from torch import Tensor

from marl_pool.compiled.ppo import RecordedSteps
from marl_pool.policies.actions import ActionSpec, entropy, kl_divergence, log_prob

STATISTICS = (
    POLICY_LOSS_KEY,
    VF_LOSS_KEY,
    ENTROPY_KEY,
    LEARNER_RESULTS_KL_KEY,
)
"""RLlib's names of `PPOTerms.statistics`."""


@dataclass(frozen=True)
class PPOTerms:
    r"""The terms of PPO's loss, for each step ``(B,)``.

    .. math::
        L = -\min(\rho A, \mathrm{clip}(\rho, 1 - \epsilon, 1 + \epsilon) A)
            + c_v \min((V - V^*)^2, d) - c_e H + c_{kl} KL

    :math:`\rho` is the ratio of the action's probability to that while sampling, and d
    limits the squared error of a value.

    Source: Schulman et al., Proximal policy optimization algorithms (2017), equations
    7 to 9, https://arxiv.org/abs/1707.06347, with the clipped value loss and the
    adaptive KL penalty of RLlib's ``PPOTorchLearner``, whose loss it equals for
    finite logits. `PPOSettings.kl_estimate` says to which divergence it adapts.
    """

    ratio: Tensor
    """ρ."""
    surrogate: Tensor
    """The clipped surrogate objective."""
    values: Tensor
    """V, predicted."""
    value_loss: Tensor
    """The squared error of the values, clipped."""
    kl: Tensor | None
    """KL divergence from the sampling policy; None if it is not penalized."""
    targets: Tensor
    """V*."""
    actions: ActionSpec
    logits: Tensor
    """Parameters of the action distributions, ``(B, L)``."""

    @property
    def entropy(self) -> Tensor:
        """H, computed only where it is needed."""
        return entropy(self.actions, self.logits)

    @classmethod
    def of(
        cls,
        config: PPOConfig,
        actions: ActionSpec,
        rows: Mapping[str, Any],
        logits: Tensor,
        values: Tensor,
    ) -> "PPOTerms":
        """Compute the terms.

        Args:
            config: RLlib's configuration of the module.
            actions: action space.
            rows: columns ``(B, …)`` of the training batch.
            logits: ``(B, L)`` of the current policy.
            values: ``(B,)`` in the units of the targets.
        """
        # Clip the ratio where that lowers the objective.
        log_probs = log_prob(actions, logits, rows[Columns.ACTIONS])
        ratio = (log_probs - rows[Columns.ACTION_LOGP]).exp()
        clipped = ratio.clamp(1 - config.clip_param, 1 + config.clip_param)
        advantages = rows[Postprocessing.ADVANTAGES]
        surrogate = torch.minimum(advantages * ratio, advantages * clipped)
        targets = rows[Postprocessing.VALUE_TARGETS]
        prior = rows[Columns.ACTION_DIST_INPUTS]
        return cls(
            ratio=ratio,
            surrogate=surrogate,
            values=values,
            value_loss=value_errors(values, targets, config.vf_clip_param),
            kl=kl_divergence(actions, prior, logits) if config.use_kl_loss else None,
            targets=targets,
            actions=actions,
            logits=logits,
        )

    def loss(
        self, value_coeff: float, entropy_coeff: float, kl_coeff: Tensor | float
    ) -> Tensor:
        """Return the mean loss over the steps, a scalar."""
        loss = value_coeff * self.value_loss - self.surrogate
        if entropy_coeff:
            loss = loss - entropy_coeff * self.entropy
        if self.kl is not None:
            loss = loss + kl_coeff * self.kl
        return loss.mean()

    @torch.no_grad()
    def statistics(self) -> Tensor:
        """Return the means of the terms, in the order of `STATISTICS`."""
        kl = self.values.new_zeros(()) if self.kl is None else self.kl.mean()
        return torch.stack(
            [
                -self.surrogate.mean(),
                self.value_loss.mean(),
                self.entropy.mean(),
                kl,
            ]
        ).detach()


def explained_variance(values: Tensor, targets: Tensor) -> Tensor:
    """Return the share of the targets' variance that values explain, at least -1.

    Values and targets are of the same shape, the share is a scalar.
    """
    # Avoid 0 / 0 where all targets are equal.
    variance = targets.var(correction=0) + 1e-6
    unexplained = (targets - values).var(correction=0) / variance
    return (1 - unexplained).clamp(min=-1)


def value_errors(values: Tensor, targets: Tensor, limit: float) -> Tensor:
    """Return squared errors, clipped so that outliers do not dominate.

    All are of the same shape; the values are in the units of the targets.
    """
    errors = (values - targets).square()
    return errors.clamp(max=limit) if limit < float("inf") else errors


def recorded_steps(rows: Mapping[str, Any], actions: ActionSpec) -> RecordedSteps:
    """Return the columns ``(B, …)`` that the kernel's loss reads."""
    logits = rows[Columns.ACTION_DIST_INPUTS]
    return RecordedSteps(
        actions=rows[Columns.ACTIONS],
        log_probs=rows[Columns.ACTION_LOGP],
        logits=logits,
        advantages=rows[Postprocessing.ADVANTAGES],
        targets=rows[Postprocessing.VALUE_TARGETS],
        # A selection has as many options as there were tokens.
        sizes=logits.shape[-1:] if actions.selects else actions.sizes,
    )
