"""Environments of the views, whose every step is held to all rules, values included."""

from collections.abc import Mapping

from torch import Tensor

from marl_pool.envs.base import BatchedEnv, Step
from marl_pool.envs.rules import (
    checked_observation,
    checked_step,
    presence_of,
    validate_lives,
    validate_types,
)
from marl_pool.envs.timeout import env_call
from marl_pool.finite import validate_finite
from marl_pool.tokens import Tokens


class CheckedEnv:
    """Play an environment, and raise InputError where it breaks its contract.

    Args:
        env: the environment.

    Attributes:
        lives: agents that live and act; set by `reset` and `step`.
    """

    def __init__(self, env: BatchedEnv) -> None:
        self.env = env

    def reset(self, where: Tensor | None = None) -> None:
        """Begin the next episode, where ``where`` ``(num_envs,)`` is True or None."""
        with env_call(self.env, "a reset"):
            self.env.reset(where)
        self.lives = presence_of(self.env)
        validate_lives(self.env, self.lives, first_steps=self.env.steps)

    def step(self, actions: Mapping[str, Tensor]) -> Step:
        """Advance every environment by one step; see `BatchedEnv.step`."""
        env, steps = self.env, self.env.steps.clone()
        with env_call(env, "a step"):
            step = checked_step(env, actions)
        validate_lives(env, self.lives, step.rewards, first_steps=steps)
        for name, rewards in step.rewards.items():
            validate_finite(
                name, rewards=rewards[None], env_ids=env.env_ids, first_steps=steps
            )
        self.lives = presence_of(env)
        goes_on = ~(step.terminated | step.truncated)
        validate_lives(env, self.lives, first_steps=env.steps, playing=goes_on)
        return step

    def observe(self) -> dict[str, Tokens]:
        """Return tokens for each group; see `BatchedEnv.observe`."""
        with env_call(self.env, "an observation"):
            observed = checked_observation(self.env)
        for name, tokens in observed.items():
            validate_types(self.env, name, tokens, self.env.steps)
            validate_finite(
                name,
                tokens.map(lambda part: part[None]),
                env_ids=self.env.env_ids,
                first_steps=self.env.steps,
            )
        return observed
