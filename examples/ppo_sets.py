"""PPO on sets in one file: torch, Gymnasium, and a pooling head of this package.

    pip install .
    python examples/ppo_sets.py                                # 1 M steps
    python examples/ppo_sets.py --pooling max --counts 1-31-0 --seed 1

The agent sees 31 entities as tokens and has to stay near the centroid of three of them.
A transformer without positions and a pooling head reduce the set to one vector, so that
neither the order nor the number of entities is fixed. The style follows CleanRL
(https://github.com/vwxyzjn/cleanrl): read the file from top to bottom.

It is the algorithm of ``marl-pool train experiment=simple_centroid`` in plain torch,
without ray, checkpoints, several agents and compiled kernels.
"""

import argparse
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Normal
from torch.nn.functional import scaled_dot_product_attention

import marl_pool
import marl_pool.envs  # registers the ids

Observation = dict[str, Tensor]
"""Features ``(B, N, F)``, types ``(B, N)`` int64 and padding ``(B, N)`` bool."""


@dataclass
class Settings:
    """Options of the command line; PPO's defaults are ``ppo=fast_centroid``'s."""

    pooling: str = "ada"
    counts: str = "1-3-28"  # agents, signal entities, distractors
    seed: int = 0
    total_steps: int = 1_000_000
    num_envs: int = 64
    num_steps: int = 32  # of each environment, in one batch
    num_minibatches: int = 4
    num_epochs: int = 3
    lr: float = 3.5e-3  # decays linearly to 0
    gamma: float = 0.9
    gae_lambda: float = 0.9
    clip: float = 0.2
    value_coeff: float = 0.3
    grad_clip: float = 10.0
    threads: int = 1
    suite: str = "quick"  # perturbations to evaluate after training
    episodes: int = 256
    out: Path | None = None  # folder for the suite's tables and plots


class Block(nn.Module):
    """Pre-norm transformer layer, equivariant to the order of the tokens."""

    def __init__(self, dim: int = 8, num_heads: int = 8, dim_ff: int = 32) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.LayerNorm(dim)
        self.query, self.key, self.value, self.out = (
            nn.Linear(dim, dim, bias=False) for _ in range(4)
        )
        self.feedforward = nn.Sequential(
            nn.LayerNorm(dim), nn.Linear(dim, dim_ff), nn.GELU(), nn.Linear(dim_ff, dim)
        )

    def forward(self, x: Tensor, padding: Tensor | None) -> Tensor:
        """Map ``(B, N, dim)`` to ``(B, N, dim)``; nothing attends to padding."""
        normed = self.attention_norm(x)
        query, key, value = (
            layer(normed).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        # Scores are divided by the square root of the model's width, as in the paper.
        attended = scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=None if padding is None else ~padding[:, None, None, :],
            scale=x.shape[-1] ** -0.5,
        )
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.feedforward(x)


class Agent(nn.Module):
    """Token embedding, transformer, pooling head, and two MLPs on the pooled vector."""

    def __init__(
        self,
        observations: gymnasium.spaces.Dict,
        actions: gymnasium.spaces.Box,
        pooling: str,
        dim: int = 8,
        num_layers: int = 3,
        type_width: int = 4,
        hidden: int = 32,
    ) -> None:
        super().__init__()
        features, types = observations["features"], observations["types"]
        assert isinstance(features, gymnasium.spaces.Box)
        assert isinstance(types, gymnasium.spaces.Box)
        num_types = int(types.high.max()) + 1
        self.types = nn.Embedding(num_types, type_width)
        self.project = nn.Linear(features.shape[-1] + type_width, dim)
        self.encoder = nn.ModuleList(Block(dim) for _ in range(num_layers))
        # Any of `marl_pool.pooling_names()`, or a custom class.
        self.pooling = marl_pool.make_pooling(pooling, dim=dim)
        self.action_head = perceptron(dim, hidden, 2 * actions.shape[0])
        self.value_head = perceptron(dim, hidden, 1)
        self.apply(init_weights)

    def forward(self, observation: Observation) -> tuple[Normal, Tensor]:
        """Return the actions' distribution ``(B, A)`` and the values ``(B,)``."""
        features, types = observation["features"], observation["types"]
        x = torch.cat([features, self.types(types)], dim=-1)
        x = nn.functional.gelu(self.project(x))
        # A head may add tokens, as `cls` does.
        tokens = self.pooling.prepend(x, observation["padding"], types)
        x, padding, all_types = tokens
        for block in self.encoder:
            x = block(x, padding)
        pooled = self.pooling(x, padding, all_types)
        mean, log_std = self.action_head(pooled).chunk(2, dim=-1)
        distribution = Normal(mean, log_std.clamp(-1, 1).exp(), validate_args=False)
        return distribution, self.value_head(pooled)[:, 0]


def perceptron(width: int, hidden: int, out: int) -> nn.Sequential:
    """Return three linear layers with GELU between them."""
    return nn.Sequential(
        nn.Linear(width, hidden),
        nn.GELU(),
        nn.Linear(hidden, hidden),
        nn.GELU(),
        nn.Linear(hidden, out),
    )


def init_weights(module: nn.Module) -> None:
    """Draw weights from N(0, 0.2²), as the paper's configuration of this task does."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.2)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)


class Player:
    """A trained agent that takes the most likely action for each observation."""

    def __init__(self, agent: Agent, actions: gymnasium.spaces.Box) -> None:
        self.agent, self.actions = agent, actions

    @torch.no_grad()
    def __call__(self, observation: dict[str, np.ndarray]) -> np.ndarray:
        """Return actions ``(B, A)`` in the environment's space."""
        distribution, _ = self.agent(to_tensors(observation))
        return to_space(distribution.mean, self.actions)


def to_tensors(observation: dict[str, np.ndarray]) -> Observation:
    """Convert the parts of an observation, ``(B, …)`` each."""
    return {name: torch.from_numpy(part) for name, part in observation.items()}


def to_space(actions: Tensor, space: gymnasium.spaces.Box) -> np.ndarray:
    """Map [-1, 1] to the bounds of the action space, and clip what lies outside."""
    unit = (actions.clamp(-1, 1).double().numpy() + 1) / 2
    return (space.low + unit * (space.high - space.low)).astype(space.dtype)


def advantages(batch: dict[str, Tensor], settings: Settings) -> Tensor:
    """Return generalized advantages ``(T, B)`` (https://arxiv.org/abs/1506.02438)."""
    gamma, decay = settings.gamma, settings.gamma * settings.gae_lambda
    errors = batch["reward"] + gamma * batch["next_value"] - batch["value"]
    results, total = torch.zeros_like(errors), torch.zeros_like(errors[0])
    for t in reversed(range(len(errors))):
        total = errors[t] + decay * total * ~batch["over"][t]
        results[t] = total
    return results


def learn(
    agent: Agent,
    optimizer: torch.optim.Optimizer,
    batch: dict[str, Tensor],
    settings: Settings,
) -> None:
    """Take the gradient steps of one batch, whose columns are ``(T · B, …)``."""
    advantage, target = batch["advantage"], batch["target"]
    advantage = (advantage - advantage.mean()) / advantage.std(correction=0).clamp(1e-4)
    # The value loss is relative to the spread and the errors of this batch's targets.
    errors = (target - batch["value"]).square().mean()
    scale = 1 / (target.var(correction=0) + errors + 1e-8)
    for _ in range(settings.num_epochs):
        for rows in torch.randperm(len(target)).chunk(settings.num_minibatches):
            observations = {
                name: batch[name][rows] for name in ("features", "types", "padding")
            }
            distribution, value = agent(observations)
            log_prob = distribution.log_prob(batch["action"][rows]).sum(-1)
            ratio = (log_prob - batch["log_prob"][rows]).exp()
            clipped = ratio.clamp(1 - settings.clip, 1 + settings.clip)
            gain = torch.minimum(ratio * advantage[rows], clipped * advantage[rows])
            value_loss = scale * (value - target[rows]).square()
            loss = (settings.value_coeff * value_loss - gain).mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), settings.grad_clip)
            optimizer.step()


def train(settings: Settings) -> Player:
    """Train an agent, and print the mean return of the last 256 episodes."""
    torch.manual_seed(settings.seed)
    torch.set_num_threads(settings.threads)
    envs = gymnasium.make_vec(
        "marl_pool/simple_centroid-v0", settings.num_envs, counts=settings.counts
    )
    observations, space = envs.single_observation_space, envs.single_action_space
    assert isinstance(observations, gymnasium.spaces.Dict)
    assert isinstance(space, gymnasium.spaces.Box)
    agent = Agent(observations, space, settings.pooling)
    optimizer = torch.optim.Adam(agent.parameters(), lr=settings.lr)
    batch_size = settings.num_envs * settings.num_steps
    iterations = settings.total_steps // batch_size
    running = np.zeros(settings.num_envs)
    returns: deque[float] = deque(maxlen=256)
    started = time.monotonic()

    arrays, _ = envs.reset(seed=settings.seed)
    for iteration in range(iterations):
        optimizer.param_groups[0]["lr"] = settings.lr * (1 - iteration / iterations)
        # Play; the columns of a step are (B, …).
        steps: list[dict[str, Tensor]] = []
        for _ in range(settings.num_steps):
            observation = to_tensors(arrays)
            with torch.no_grad():
                distribution, value = agent(observation)
                action = distribution.sample()
                log_prob = distribution.log_prob(action).sum(-1)
            arrays, reward, terminated, truncated, infos = envs.step(
                to_space(action, space)
            )
            over = terminated | truncated
            # A truncated episode is worth its rewards plus the value of its last state.
            end_value = torch.zeros_like(value)
            if truncated.any():
                rows = truncated.nonzero()[0]
                last = [infos["final_obs"][row] for row in rows]
                stacked = {name: np.stack([o[name] for o in last]) for name in arrays}
                with torch.no_grad():
                    end_value[rows] = agent(to_tensors(stacked))[1]
            steps.append(
                {
                    **observation,
                    "action": action,
                    "log_prob": log_prob,
                    "value": value,
                    "end_value": end_value,
                    "reward": torch.from_numpy(reward).float(),
                    "over": torch.from_numpy(over),
                }
            )
            running += reward
            returns.extend(running[over])
            running[over] = 0
        batch = {name: torch.stack([step[name] for step in steps]) for name in steps[0]}
        with torch.no_grad():
            last_value = agent(to_tensors(arrays))[1]
        following = torch.cat([batch["value"][1:], last_value[None]])
        batch["next_value"] = batch["end_value"].where(batch["over"], following)
        # Learn from all steps at once.
        batch["advantage"] = advantages(batch, settings)
        batch["target"] = batch["advantage"] + batch["value"]
        batch = {name: column.flatten(0, 1) for name, column in batch.items()}
        learn(agent, optimizer, batch, settings)
        if returns and (iteration % 20 == 19 or iteration == iterations - 1):
            played = (iteration + 1) * batch_size
            speed = played / (time.monotonic() - started)
            mean = np.mean(returns)
            print(f"{played:,} steps  {speed:,.0f} steps/s  return mean {mean:.4f}")
    return Player(agent, space)


def main() -> None:
    """Train, then measure the loss under perturbations and more distractors."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name, default in vars(Settings()).items():
        kind = Path if default is None else type(default)
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=default)
    settings = Settings(**vars(parser.parse_args()))
    player = train(settings)
    marl_pool.evaluate(
        player,
        env={"name": "simple_centroid", "counts": settings.counts},
        suite=settings.suite,
        episodes=settings.episodes,
        title=f"{settings.pooling} in one file",
        out=settings.out,
    )


if __name__ == "__main__":
    main()
