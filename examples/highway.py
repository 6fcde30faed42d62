"""Measure the robustness of a Stable-Baselines3 model on HighwayEnv, in its own space.

    pip install marl-pool stable-baselines3 highway-env
    python examples/highway.py --timesteps 20000

An observation is a table with a row per vehicle, whose first column is 1 if the vehicle
is present. The model reads it as one long vector, so it depends on the order of rows.
"""

import argparse

import gymnasium
import highway_env  # noqa: F401, registers the ids
from stable_baselines3 import PPO

import marl_pool

ID = "intersection-v2"
# Perturbations that spare the observer recognize it by the type self.
ROWS = {"presence": 0, "token_types": ["self"] + ["vehicle"] * 14, "positions": [1, 2]}


def main() -> None:
    """Train on the env as it is, then perturb its rows of vehicles."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--timesteps", type=int, default=20_000)
    parser.add_argument("--episodes", type=int, default=32)
    parser.add_argument("--tokens", action="store_true", help="train on tokens")
    arguments = parser.parse_args()

    env, policy = gymnasium.make(ID), "MlpPolicy"
    if arguments.tokens:
        env, policy = marl_pool.tokenize_env(env, **ROWS), "MultiInputPolicy"
    steps = min(256, arguments.timesteps)
    model = PPO(policy, env, n_steps=steps, gamma=0.9, seed=0)
    model.learn(arguments.timesteps)

    def make() -> gymnasium.Env:
        env = gymnasium.make(ID)
        return marl_pool.tokenize_env(env, **ROWS) if arguments.tokens else env

    options = {} if arguments.tokens else ROWS
    marl_pool.evaluate(
        model,
        env={"name": "pettingzoo", "module": make, **options},
        suite="quick",
        episodes=arguments.episodes,
        title="Stable-Baselines3 PPO",
    )


if __name__ == "__main__":
    main()
