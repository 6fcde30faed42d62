"""A TokenPolicy as RLlib sees it."""

from collections.abc import Mapping
from typing import Any

from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.apis import ValueFunctionAPI
from ray.rllib.core.rl_module.torch import TorchRLModule
from torch import Tensor

from marl_pool.policies.actions import ActionSpec
from marl_pool.policies.token_policy import TokenPolicy
from marl_pool.tokens import Tokens, TokenSpec
from marl_pool.training.ppo.batch import VALUE_SCALE


def build_policy(model_config: Mapping[str, Any]) -> TokenPolicy:
    """Build the policy that ``model_config["policy"]`` describes."""
    options = dict(model_config["policy"])
    spec = TokenSpec(**options.pop("spec"))
    action_space = ActionSpec(**options.pop("action_space"))
    return TokenPolicy(spec, action_space, **options)


class TokenRLModule(TorchRLModule, ValueFunctionAPI):
    """The module of a learner and, in the same form, of a runner.

    It does not implement ``InferenceOnlyAPI``: runners need the value head, since
    they record the values. ``model_config["policy"]`` holds the arguments of
    `TokenPolicy`, with ``spec`` and ``action_space`` in their JSON form.
    """

    def setup(self) -> None:
        """Build the policy."""
        self.policy = build_policy(self.model_config)

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Tensor]:
        pooled = self.policy.network(_tokens(batch))
        return {
            Columns.EMBEDDINGS: pooled,
            Columns.ACTION_DIST_INPUTS: self.policy.logits(pooled),
        }

    def compute_values(
        self, batch: dict[str, Any], embeddings: Tensor | None = None
    ) -> Tensor:
        """Values ``(B,)``, scaled if the batch says so.

        Args:
            batch: observations, and `VALUE_SCALE` if the loss is normalised.
            embeddings: pooled vectors; they spare the shared trunk a second pass.
        """
        tokens = _tokens(batch)
        if embeddings is None:
            embeddings = self.policy.network(tokens)
        values = self.policy.values(tokens, embeddings)
        return values * batch[VALUE_SCALE] if VALUE_SCALE in batch else values


def _tokens(batch: dict[str, Any]) -> Tokens:
    return Tokens(**batch[Columns.OBS])
