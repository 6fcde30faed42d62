"""Train RLlib's PPO on sets of tokens, and measure how robust it is.

    pip install '.[rllib,plots]'
    python examples/rllib.py --iterations 50

Its encoders are set networks, so no shuffle can harm it, and more tokens fit.
"""

import argparse
from pathlib import Path

import ray
from ray.rllib.algorithms.ppo import PPOConfig

import marl_pool
from marl_pool.adapters.rllib import as_policy, set_module_spec

ENV = "marl_pool.envs:marl_pool/simple_centroid-v0"
SMALL, LARGE = "1-3-4", "1-3-28"  # agents, signal entities, distractors


def main() -> None:
    """Train on the Gymnasium view of an environment, then evaluate."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--iterations", type=int, default=50)
    parser.add_argument("--pooling", default="ada")
    parser.add_argument("--episodes", type=int, default=256)
    parser.add_argument("--out", type=Path, help="folder for tables and plots")
    arguments = parser.parse_args()

    ray.init(address="local", num_cpus=1, include_dashboard=False)
    config = PPOConfig().environment(ENV, env_config={"counts": SMALL})
    config.env_runners(num_env_runners=0, num_envs_per_env_runner=16)
    config.training(train_batch_size=2048, minibatch_size=512, num_epochs=6)
    config.training(lr=1e-3, gamma=0.9, lambda_=0.9).debugging(seed=0)
    network = {"pooling": arguments.pooling, "encoder": "identity", "dim": 64}
    spec = set_module_spec(config, **network)
    algorithm = config.rl_module(rl_module_spec=spec).build_algo()
    for iteration in range(1, arguments.iterations + 1):
        result = algorithm.train()["env_runners"]
        steps, mean = 2048 * iteration, result["episode_return_mean"]
        print(f"{steps} steps: return {mean:.3f}", flush=True)

    policy = as_policy(algorithm.get_module())
    marl_pool.evaluate(
        policy,
        env={"name": "simple_centroid", "counts": SMALL},
        suite="quick",
        episodes=arguments.episodes,
        title=f"RLlib PPO, {arguments.pooling}",
        out=arguments.out,
    )
    marl_pool.evaluate(
        policy,
        env={"name": "simple_centroid", "counts": LARGE},
        suite={"perturbations": []},
        episodes=arguments.episodes,
        title=f"with {LARGE} instead of {SMALL}",
    )


if __name__ == "__main__":
    main()
