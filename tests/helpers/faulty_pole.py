"""A cart-pole whose simulation fails, for the campaign and tests of a time limit."""

import time
from typing import Unpack

import torch
from typing_extensions import override

from marl_pool.envs.base import EnvOptions
from marl_pool.envs.cartpole.env import CartPole


class FaultyPole(CartPole):
    """CartPole that fails in every step after the first ``after``.

    Args:
        fault: raises, runs_out, hangs, spins (without a system call), slow, NaN_reward,
            NaN_observation, NaN_state, wrong_state, double_state, no_state,
            other_state, listed_state, number_state, wrong_shape or none.
        after: steps before the first fault.
    """

    num_steps = 0
    """Steps of all objects in this process; copies count too."""

    def __init__(
        self,
        num_envs: int,
        *,
        fault: str = "raises",
        after: int = 5,
        max_steps: int = 20,
        **common: Unpack[EnvOptions],
    ) -> None:
        super().__init__(num_envs, max_steps=max_steps, **common)
        self.fault, self.after = fault, after

    @override
    def observe(self):
        tokens = super().observe()
        if self.fault == "NaN_observation" and self.num_steps > self.after:
            return {
                k: t._replace(features=t.features * torch.nan)
                for k, t in tokens.items()
            }
        return tokens

    @property
    @override
    def state_specs(self):
        specs = super().state_specs
        faulty = {
            "other_state": {"pole": specs["agent"]},
            "listed_state": ["agent"],
            "number_state": {"agent": 3},
            "no_state": {},
        }
        return faulty.get(self.fault, specs)

    @override
    def observe_state(self):
        states = super().observe_state()
        if self.fault == "NaN_state":
            return {k: t._replace(features=t.features / 0) for k, t in states.items()}
        if self.fault == "wrong_state":
            return {k: t.map(lambda part: part[:, :, 1:]) for k, t in states.items()}
        if self.fault == "double_state":
            return {
                k: t._replace(features=t.features.double()) for k, t in states.items()
            }
        return states

    @override
    def advance(self, actions):
        type(self).num_steps += 1
        rewards, terminated = super().advance(actions)
        if self.num_steps <= self.after:
            return rewards, terminated
        if self.fault == "raises":
            raise RuntimeError("no such state")
        if self.fault == "runs_out":
            raise StopIteration
        if self.fault == "hangs":
            time.sleep(10_000)
        while self.fault == "spins":
            pass
        if self.fault == "slow":
            time.sleep(0.3)
        if self.fault == "NaN_reward":
            rewards = {name: part * torch.nan for name, part in rewards.items()}
        if self.fault == "wrong_shape":
            rewards = {name: part[:, None] for name, part in rewards.items()}
        return rewards, terminated
