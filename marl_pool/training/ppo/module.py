"""A TokenPolicy as RLlib sees it."""

from collections.abc import Mapping
from typing import Any

import torch
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.apis import ValueFunctionAPI
from ray.rllib.core.rl_module.torch import TorchRLModule
from torch import Tensor
from torch.utils._pytree import tree_structure, tree_unflatten

from marl_pool.policies.actions import ActionSpec
from marl_pool.policies.token_policy import TokenPolicy
from marl_pool.tokens import Tokens, TokenSpec
from marl_pool.training.ppo.batch import VALUE_SCALE
from marl_pool.training.ppo.episodes import STATE


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
        tokens = Tokens(**batch[Columns.OBS])
        if self.policy.recurrent:
            pooled, below_value = self._unroll(tokens, batch)
        else:
            pooled, below_value = self.policy.pool(tokens)
        return {
            Columns.EMBEDDINGS: below_value,
            Columns.ACTION_DIST_INPUTS: self.policy.logits(pooled),
        }

    def _unroll(self, tokens: Tokens, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        structure = tree_structure(self.policy.initial_state(1, 1, 1))
        leaves = [batch[f"{STATE}/{i}"] for i in range(structure.num_leaves)]
        state = tree_unflatten(leaves, structure)
        actions = self.policy.actions.to_vectors(batch[Columns.ACTIONS])
        earlier = actions[:, :-1].to(state["action"].dtype)
        prev_action = torch.cat([state["action"][:, None], earlier], dim=1)
        return self.policy.unroll(tokens, prev_action, state["memory"])[:2]

    def compute_values(
        self, batch: dict[str, Any], embeddings: Tensor | None = None
    ) -> Tensor:
        """Values ``(B,)``, scaled if the batch says so.

        Args:
            batch: observations, and `VALUE_SCALE` if the loss is normalised.
            embeddings: what is below the value head; it spares a second pass.
        """
        if embeddings is None:
            embeddings = self._forward(batch)[Columns.EMBEDDINGS]
        values = self.policy.values(embeddings)
        return values * batch[VALUE_SCALE] if VALUE_SCALE in batch else values
