"""How robust is a stock RLlib module? Train one, then measure it.

    python scripts/examples/rllib_module.py --iterations 50

Nothing of `marl_pool.training` is used: RLlib's own PPO, runner, and network, which
takes all tokens as one long vector.
"""

import argparse
from pathlib import Path

import gymnasium
import numpy as np
import ray
import torch
from gymnasium.wrappers import FlattenObservation
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module import RLModule
from ray.tune.registry import register_env

import marl_pool
import marl_pool.envs  # registers the ids

ENV = {"name": "simple_centroid", "counts": "1-3-4"}


def make_env() -> gymnasium.Env:
    """The Gymnasium view of a world, its observations flat."""
    env = gymnasium.make("marl_pool/simple_centroid-v0", counts=ENV["counts"])
    return FlattenObservation(env)


def train(iterations: int, seed: int) -> RLModule:
    """Train with RLlib as it comes."""
    register_env("flat_centroid", lambda _: make_env())
    config = (
        PPOConfig()
        .environment("flat_centroid")
        .env_runners(num_env_runners=0)
        .training(train_batch_size=2048, minibatch_size=256, num_epochs=8, gamma=0.9)
        .debugging(seed=seed)
    )
    algorithm = config.build_algo()
    for iteration in range(1, iterations + 1):
        mean = algorithm.train()["env_runners"].get("episode_return_mean", np.nan)
        print(f"iteration {iteration}: mean return {mean:.3f}")
    return algorithm.get_module()


class Player:
    """From observations to actions, as RLlib's connectors would do it.

    Args:
        module: with a Gaussian head on flat observations.
    """

    def __init__(self, module: RLModule) -> None:
        self.module = module
        env = make_env()
        assert isinstance(env.action_space, gymnasium.spaces.Box)
        self.low, self.high = env.action_space.low, env.action_space.high
        self.names = list(env.unwrapped.observation_space.spaces)

    def __call__(self, observation: dict[str, np.ndarray]) -> np.ndarray:
        """Take the means of the module's Gaussians."""
        parts = [observation[name] for name in self.names]
        flat = np.concatenate([part.reshape(len(part), -1) for part in parts], axis=1)
        batch = {Columns.OBS: torch.as_tensor(flat, dtype=torch.float32)}
        with torch.no_grad():
            outputs = self.module.forward_inference(batch)
        mean, _ = outputs[Columns.ACTION_DIST_INPUTS].chunk(2, dim=-1)
        unit = mean.clamp(-1, 1).numpy()  # RLlib trains in [-1, 1] by default
        return self.low + (unit + 1) / 2 * (self.high - self.low)


def main() -> None:
    """Train a module, or load one from a checkpoint, and measure it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--iterations", type=int, default=50)
    parser.add_argument("--module", type=Path, help="a module's checkpoint, your own")
    parser.add_argument("--suite", default="quick")
    parser.add_argument("--episodes", type=int, default=256)
    parser.add_argument("--out", type=Path, help="a folder for the tables")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    ray.init(num_cpus=1, include_dashboard=False)
    try:
        if arguments.module:
            module = RLModule.from_checkpoint(arguments.module)
        else:
            module = train(arguments.iterations, arguments.seed)
        marl_pool.evaluate(
            policy=Player(module),
            env=ENV,
            suite=arguments.suite,
            episodes=arguments.episodes,
            seed=arguments.seed,
            title="RLlib PPO",
            out=arguments.out,
        )
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
