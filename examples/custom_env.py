"""Write an environment as a batch of tensors, and train on it.

    python examples/custom_env.py

Arguments are overrides, as for ``marl-pool train``. An existing PettingZoo
``ParallelEnv`` needs no code: ``env=pettingzoo env.module=my_envs:make``.
"""

import argparse

import torch
from gymnasium import spaces

import marl_pool
from marl_pool.envs.base import AgentGroup, BatchedEnv
from marl_pool.tokens import Tokens, TokenSpec


class Reach(BatchedEnv):
    """An agent in the plane that has to reach the nearest of several targets.

    Args:
        num_targets: number of targets.
        **common: see the base class.
    """

    state_names = ("points",)

    def __init__(
        self, num_envs, *, num_targets: int = 3, max_steps: int = 20, **common
    ):
        super().__init__(num_envs, max_steps=max_steps, **common)
        self.points = torch.zeros(num_envs, 1 + num_targets, 2)  # the agent is first
        spec = TokenSpec(1 + num_targets, 2, ("self", "target"), positions=(0, 1))
        self.groups = {"agent": AgentGroup(1, spec, spaces.Box(-1.0, 1.0, (2,)))}

    def observe(self):
        """Positions relative to the agent: (num_envs, agents, tokens, 2)."""
        relative = (self.points - self.points[:, :1])[:, None]
        types = torch.ones(relative.shape[:-1], dtype=torch.long)
        types[..., 0] = 0
        return {"agent": Tokens(relative, types, torch.zeros_like(types) > 0)}

    def place(self, rows, keys):
        uniform = self.sample_uniform(keys, self.points[0].numel())
        self.points = self.points.clone()
        self.points[rows] = 2 * uniform.unflatten(1, (-1, 2)) - 1

    def advance(self, actions):
        self.points = self.points.clone()
        self.points[:, 0] += 0.1 * actions["agent"][:, 0]
        distances = (self.points[:, 1:] - self.points[:, :1]).norm(dim=-1)
        return {"agent": -distances.amin(1, keepdim=True)}, distances.amin(1) < 0.05


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("overrides", nargs="*", help="as for marl-pool train")
    run = marl_pool.train(
        "time_limit=60", *parser.parse_args().overrides, env="custom_env:Reach"
    )
    print(f"{run.path}: last return {run.rows()[-1]['return_mean']:.2f}")
