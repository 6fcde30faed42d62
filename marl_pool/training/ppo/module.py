"""RLlib module around a `TokenPolicy`."""

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.apis import ValueFunctionAPI
from ray.rllib.core.rl_module.torch import TorchRLModule
from torch import Tensor, nn
from torch.utils._pytree import tree_structure, tree_unflatten
from typing_extensions import override

from marl_pool.compiled import CompiledTokenPolicy
from marl_pool.critics import CRITICS
from marl_pool.critics.base import Critic, of_present
from marl_pool.options.construction import build
from marl_pool.policies.actions import ActionSpec, mask_logits
from marl_pool.policies.token_policy import ActionInput, TokenPolicy, pooled_of
from marl_pool.tokens import Tokens, TokenSpec
from marl_pool.training.ppo.batch import CRITIC_OBS, STATE, VALUE_SCALE
from marl_pool.training.ppo.value_norm import ValueNorm

POLICY = "policy"
"""Key of a module's ``model_config``: the arguments of a `TokenPolicy`, as JSON."""
CRITIC = "critic"
"""Key of a module's ``model_config``: name and options of a critic, as JSON."""
CONTEXT = "critic_context"
"""Key of a module's ``model_config``: further arguments of a critic, which are number
of agents, specification of the state, and seed."""
VALUE_NORM = "value_norm"
"""Key of a module's ``model_config``: True if values are normalized."""


def build_policy(model_config: Mapping[str, Any]) -> TokenPolicy:
    """Build the policy of a module from its ``model_config``."""
    options = dict(model_config[POLICY])
    spec = TokenSpec(**options.pop("spec"))
    action_space = ActionSpec(**options.pop("action_space"))
    return TokenPolicy(spec, action_space, **options)


def build_critic(model_config: Mapping[str, Any], policy: TokenPolicy) -> Critic | None:
    """Build the critic of a module; None if it is the policy's value head."""
    options = dict(model_config.get(CRITIC, {"name": "own"}))
    name = options.pop("name")
    if name == "own":
        return None
    context = dict(model_config[CONTEXT])
    if state_spec := context.pop("state_spec"):
        context["state_spec"] = TokenSpec(**state_spec)
    context["policy"] = policy
    critic: Critic = build(name, CRITICS, "critic", Critic, options, context)
    return critic


class TokenRLModule(TorchRLModule, ValueFunctionAPI):
    """RLlib module of a `TokenPolicy`, the same in learners and runners.

    It does not implement ``InferenceOnlyAPI``: runners need the value head, because
    they record values while they sample.
    """

    @override
    def setup(self) -> None:
        self.policy = build_policy(self.model_config)
        # In a tuple, so that torch does not register the shared parameters twice.
        self._compiled = (CompiledTokenPolicy(self.policy),)
        self.critic = build_critic(self.model_config, self.policy)
        self.value_norm = ValueNorm() if self.model_config.get(VALUE_NORM) else None
        self.unused_parameters: tuple[nn.Parameter, ...] = ()
        if self.critic is not None:
            # These are not trained, and several learners would wait for gradients.
            parts = (self.policy.value_head, self.policy.value_network)
            self.unused_parameters = tuple(
                itertools.chain(*(part.parameters() for part in parts if part))
            )
            for parameter in self.unused_parameters:
                parameter.requires_grad_(False)

    @property
    def actor(self) -> CompiledTokenPolicy:
        """The policy, computed by the compiled kernel if that fits."""
        return self._compiled[0]

    @override
    def forward_train(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Tensor]:
        # Walk over the modules only if the mode changes, not in every call.
        if not self.training:
            self.train()
        return self._forward(batch, **kwargs)

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Tensor]:
        tokens = Tokens(**batch[Columns.OBS])
        if self.critic is not None and not self.actor.recurrent:
            return self._forward_with_critic(self.critic, tokens, batch)
        for_action: ActionInput
        if self.actor.recurrent:
            for_action, below_value = self._unroll(tokens, batch)
        else:
            for_action, below_value = self.actor.pool(tokens)
        return {
            Columns.EMBEDDINGS: below_value,
            Columns.ACTION_DIST_INPUTS: mask_logits(
                self.actor.logits(for_action), self.actor.options(tokens)
            ),
        }

    def _forward_with_critic(
        self, critic: Critic, tokens: Tokens, batch: dict[str, Any]
    ) -> dict[str, Tensor]:
        """Compute logits and values of steps ``(B,)``, or of teams ``(B, agents)``."""

        def act(rows: Tokens) -> tuple[Tensor, ...]:
            for_action = self.actor.action_input(rows)
            return self.actor.logits(for_action), pooled_of(for_action)

        present = _present(batch)
        logits, pooled = of_present(act, tokens, present)
        shared = pooled if critic.shares_trunk else None
        return {
            Columns.VF_PREDS: critic(_critic_tokens(batch), present, shared),
            Columns.ACTION_DIST_INPUTS: mask_logits(logits, self.actor.options(tokens)),
        }

    def _unroll(self, tokens: Tokens, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        structure = tree_structure(self.actor.initial_state(1, 1, 1))
        leaves = [batch[f"{STATE}/{i}"] for i in range(structure.num_leaves)]
        state = tree_unflatten(leaves, structure)
        # Shift the recorded actions by one step: each step sees the action before it.
        actions = self.actor.actions.to_vectors(batch[Columns.ACTIONS])
        earlier = actions[:, :-1].to(state["action"].dtype)
        prev_action = torch.cat([state["action"][:, None], earlier], dim=1)
        return self.actor.unroll(tokens, prev_action, state["memory"])[:2]

    def compute_values(
        self, batch: dict[str, Any], embeddings: Tensor | None = None
    ) -> Tensor:
        """Compute values ``(B,)``, scaled if the value loss is normalized.

        Args:
            batch: observations, and `VALUE_SCALE` if the value loss is normalized.
            embeddings: inputs of the value head, if known, to save a second forward
                pass.
        """
        if embeddings is None:
            embeddings = self._forward(batch)[Columns.EMBEDDINGS]
        return self.scaled(self.actor.values(embeddings), batch)

    def critic_values(self, batch: Mapping[str, Any]) -> Tensor:
        """Compute the scaled values of a critic with separate networks."""
        assert self.critic is not None
        values = self.critic(_critic_tokens(batch), _present(batch))
        return self.scaled(values, batch)

    def scaled(self, values: Tensor, batch: Mapping[str, Any]) -> Tensor:
        """Return values ``(B,)`` in the units of the targets in the batch."""
        return values * batch[VALUE_SCALE] if VALUE_SCALE in batch else values


def _critic_tokens(batch: Mapping[str, Any]) -> Tokens:
    return Tokens(**batch[CRITIC_OBS if CRITIC_OBS in batch else Columns.OBS])


def _present(batch: Mapping[str, Any]) -> Tensor:
    """Return the mask of a team's present agents, ``(B, agents)`` bool."""
    present: Tensor | None = batch.get(Columns.LOSS_MASK)
    if present is None:
        tokens = Tokens(**batch[Columns.OBS])
        shape, padding = tokens.batch_shape, tokens.padding
        present = torch.ones(shape, dtype=torch.bool, device=padding.device)
    return present
