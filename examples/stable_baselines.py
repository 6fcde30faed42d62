"""Train a Stable-Baselines3 model, and measure how robust it is.

    pip install stable-baselines3
    python examples/stable_baselines.py --timesteps 200000

Its network reads all tokens as one long vector, so a shuffle must harm it.
"""

import argparse
from pathlib import Path

import gymnasium
from stable_baselines3 import PPO

import marl_pool
import marl_pool.envs  # registers the ids

COUNTS = "1-3-4"  # agents, signal entities, distractors


def main() -> None:
    """Train on the Gymnasium view of an environment, then evaluate."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--timesteps", type=int, default=200_000)
    parser.add_argument("--episodes", type=int, default=256)
    parser.add_argument("--out", type=Path, help="folder for tables and plots")
    arguments = parser.parse_args()

    env = gymnasium.make("marl_pool/simple_centroid-v0", counts=COUNTS)
    model = PPO("MultiInputPolicy", env, n_steps=1024, gamma=0.9, seed=0)
    model.learn(arguments.timesteps)

    marl_pool.evaluate(
        policy=lambda observation: model.predict(observation, deterministic=True)[0],
        env={"name": "simple_centroid", "counts": COUNTS},
        suite="quick",
        episodes=arguments.episodes,
        title="Stable-Baselines3 PPO",
        out=arguments.out,
    )


if __name__ == "__main__":
    main()
