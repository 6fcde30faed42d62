"""Train a stock RLlib module, and measure how robust it is.

    pip install '.[rllib,plots]'
    python examples/rllib.py --iterations 50

Its network reads all tokens as one long vector, so a shuffle must harm it.
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
from ray.tune.registry import register_env

import marl_pool
import marl_pool.envs  # registers the ids

COUNTS = "1-3-4"  # agents, signal entities, distractors


def main() -> None:
    """Train on the flattened Gymnasium view of an environment, then evaluate."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--iterations", type=int, default=50)
    parser.add_argument("--episodes", type=int, default=256)
    parser.add_argument("--out", type=Path, help="folder for tables and plots")
    arguments = parser.parse_args()

    ray.init(address="local", num_cpus=1, include_dashboard=False)
    plain = gymnasium.make("marl_pool/simple_centroid-v0", counts=COUNTS)
    register_env("centroid", lambda _: FlattenObservation(plain))
    config = PPOConfig().environment("centroid").env_runners(num_env_runners=0)
    config.training(train_batch_size=2048, minibatch_size=256, num_epochs=8, gamma=0.9)
    algorithm = config.debugging(seed=0).build_algo()
    for _ in range(arguments.iterations):
        algorithm.train()
    module = algorithm.get_module()

    def act(observation: dict[str, np.ndarray]) -> np.ndarray:
        parts = (observation[name] for name in plain.observation_space.spaces)
        flat = np.concatenate([part.reshape(len(part), -1) for part in parts], axis=1)
        batch = {Columns.OBS: torch.as_tensor(flat, dtype=torch.float32)}
        with torch.no_grad():
            outputs = module.forward_inference(batch)[Columns.ACTION_DIST_INPUTS]
        mean, _ = outputs.chunk(2, dim=-1)  # the module's actions are in [-1, 1]
        low, high = plain.action_space.low, plain.action_space.high
        return low + (mean.clamp(-1, 1).numpy() + 1) / 2 * (high - low)

    marl_pool.evaluate(
        policy=act,
        env={"name": "simple_centroid", "counts": COUNTS},
        suite="quick",
        episodes=arguments.episodes,
        title="RLlib PPO",
        out=arguments.out,
    )


if __name__ == "__main__":
    main()
