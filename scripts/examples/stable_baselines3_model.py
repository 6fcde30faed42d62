"""How robust is a model of Stable-Baselines3? Train one, then measure it.

    pip install stable-baselines3
    python scripts/examples/stable_baselines3_model.py --timesteps 200000

Its network takes all tokens as one long vector: a shuffle must harm it.
"""

import argparse
from pathlib import Path

import gymnasium
import numpy as np
from stable_baselines3 import PPO

import marl_pool
import marl_pool.envs  # registers the ids

ENV = {"name": "simple_centroid", "counts": "1-3-4"}


def train(timesteps: int, seed: int) -> PPO:
    """Train on the Gymnasium view of a world."""
    env = gymnasium.make("marl_pool/simple_centroid-v0", counts=ENV["counts"])
    model = PPO("MultiInputPolicy", env, n_steps=1024, gamma=0.9, seed=seed)
    return model.learn(timesteps)


def main() -> None:
    """Train or load a model, and measure it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--timesteps", type=int, default=200_000)
    parser.add_argument("--model", type=Path, help="a model saved earlier, your own")
    parser.add_argument("--suite", default="quick")
    parser.add_argument("--episodes", type=int, default=256)
    parser.add_argument("--out", type=Path, help="a folder for the tables")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.model:
        model = PPO.load(arguments.model)
    else:
        model = train(arguments.timesteps, arguments.seed)

    def act(observation: dict[str, np.ndarray]) -> np.ndarray:
        return model.predict(observation, deterministic=True)[0]

    marl_pool.evaluate(
        policy=act,
        env=ENV,
        suite=arguments.suite,
        episodes=arguments.episodes,
        seed=arguments.seed,
        title="Stable-Baselines3 PPO",
        out=arguments.out,
    )


if __name__ == "__main__":
    main()
