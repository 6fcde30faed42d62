"""A small environment with two groups of agents."""

from dataclasses import replace

import torch
from gymnasium import spaces

from marl_pool.envs.base import AgentGroup, BatchedEnv
from marl_pool.policies import make_policy
from marl_pool.policies.base import Decision, Policy
from marl_pool.policies.token_policy import TokenPolicy
from marl_pool.tokens import Tokens, TokenSpec

TOKENS = TokenSpec(4, 2, ("self", "fox", "hen"), positions=(0,))


class FoxAndHens(BatchedEnv):
    """One fox and three hens on a line; a lucky fox ends the episode.

    ``poison`` makes the observations or rewards NaN from a given step on.
    """

    def __init__(
        self,
        num_envs: int,
        *,
        end_chance: float = 0.05,
        poison: str | None = None,
        poison_step: int = 3,
        max_steps: int = 12,
        seed: int = 0,
        first_env: int = 0,
        first_episode: int = 0,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(
            num_envs,
            max_steps=max_steps,
            seed=seed,
            first_env=first_env,
            first_episode=first_episode,
            device=device,
            dtype=dtype,
            dynamics_size=5,
        )
        self.end_chance, self.poison, self.poison_step = end_chance, poison, poison_step
        self.places = torch.zeros(num_envs, 4, dtype=dtype, device=device)

    @property
    def groups(self):
        return {
            "fox": AgentGroup(1, TOKENS, spaces.Box(-1.0, 1.0, (1,))),
            "hen": AgentGroup(3, TOKENS, spaces.Discrete(3)),
        }

    def observe(self):
        x = self.places
        if self.poison == "observations":
            x = torch.where(self.steps[:, None] >= self.poison_step, torch.nan, x)
        relative = x[:, None, :] - x[:, :, None]
        features = torch.stack([relative, relative.square()], dim=-1)
        types = torch.tensor([1, 2, 2, 2]).repeat(4, 1).fill_diagonal_(0)
        types = types.expand(self.num_envs, 4, 4)
        tokens = Tokens(features, types, torch.zeros_like(types, dtype=torch.bool))
        return {
            "fox": tokens.map(lambda tensor: tensor[:, :1]),
            "hen": tokens.map(lambda tensor: tensor[:, 1:]),
        }

    def place(self, rows, keys):
        self.places = self.places.clone()
        self.places[rows] = 2 * self.sample_uniform(keys, 4) - 1

    def advance(self, actions):
        chance = self.dynamics.next()
        fox = actions["fox"][..., 0].clamp(-1, 1)
        hens = actions["hen"].to(self.dtype) - 1
        moves = torch.cat([fox, hens], dim=1)
        self.places = (self.places + 0.1 * moves + 0.02 * (chance[:, :4] - 0.5)).clamp(
            -2, 2
        )
        gap = (self.places[:, 1:] - self.places[:, :1]).abs()
        rewards = {"fox": -gap.amin(1, keepdim=True), "hen": gap}
        if self.poison == "rewards":
            bad = self.steps[:, None] >= self.poison_step
            rewards["fox"] = torch.where(bad, torch.inf, rewards["fox"])
        return rewards, chance[:, 4] < self.end_chance

    def _tensors(self):
        return {"places": self.places}


def policies_of(env: BatchedEnv, **options) -> dict[str, TokenPolicy]:
    """Make a small policy for each group of an environment."""
    encoder = {"name": "transformer", "num_layers": 1}
    options = {"encoder": encoder, "seed": 0, **options}
    return {
        name: make_policy(group.tokens, group.action_space, **options)
        for name, group in env.groups.items()
    }


class AlikeFoxAndHens(FoxAndHens):
    """The fox has the hens' three choices too, so that they may share a module."""

    @property
    def groups(self):
        group = super().groups["hen"]
        return {"fox": AgentGroup(1, TOKENS, group.action_space), "hen": group}

    def advance(self, actions):
        fox = actions["fox"][..., None].to(self.dtype) - 1
        return super().advance({**actions, "fox": fox})


class TiedHens(AlikeFoxAndHens):
    """Hens have action masks, the fox has none."""

    @property
    def groups(self):
        groups = super().groups
        return {**groups, "hen": replace(groups["hen"], has_action_masks=True)}

    def observe(self):
        tokens = super().observe()
        mask = self.places[:, 1:, None] > torch.tensor([-1.0, -3.0, 0.0])
        return {**tokens, "hen": tokens["hen"]._replace(action_mask=mask)}


class IdleFox(AlikeFoxAndHens):
    """An environment whose fox never acts."""

    @property
    def active(self) -> dict[str, torch.Tensor]:
        masks = super().active
        return {**masks, "fox": torch.zeros_like(masks["fox"])}

    def advance(self, actions):
        rewards, terminated = super().advance(actions)
        return {**rewards, "fox": torch.zeros_like(rewards["fox"])}, terminated


class StillHens(Policy):
    """Hens that never move: a scripted policy as a user would write one."""

    def __init__(self, group: AgentGroup) -> None:
        super().__init__()
        self.num_choices = int(group.action_space.n)

    def act(self, tokens, state=(), generator=None, explore=False):
        action = torch.ones(tokens.batch_shape, dtype=torch.int64)
        zeros = torch.zeros(tokens.batch_shape)
        logits = torch.zeros(*tokens.batch_shape, self.num_choices)
        return Decision(action, zeros, zeros, logits, state)


class MortalHens(FoxAndHens):
    """Hens die one after the other from the third step on; the first lives."""

    @property
    def active(self) -> dict[str, torch.Tensor]:
        active = super().active
        numbers = torch.arange(self.groups["hen"].num_agents, device=self.device)
        active["hen"] = (self.steps[:, None] < numbers + 2) | (numbers == 0)
        return active

    def advance(self, actions):
        active = self.active
        rewards, terminated = super().advance(actions)
        return {name: reward * active[name] for name, reward in rewards.items()}, (
            terminated
        )
