"""Train a Stable-Baselines3 model on sets, and measure how robust it is.

    pip install 'marl-pool[sb3,plots]'
    python examples/stable_baselines.py --timesteps 100000
    python examples/stable_baselines.py --timesteps 100000 --extractor flat

With ``SetExtractor`` neither the order nor the number of tokens is fixed. SB3's own
network, ``flat``, reads all tokens as one long vector, so a shuffle must harm it.
"""

import argparse
from pathlib import Path

import gymnasium
import torch
from stable_baselines3 import PPO

import marl_pool
import marl_pool.envs  # registers the ids
from marl_pool.adapters.sb3 import AnySizeModel, SetExtractor

SMALL, LARGE = "1-3-4", "1-3-28"  # agents, signal entities, distractors


def main() -> None:
    """Train on the Gymnasium view of an environment, then evaluate."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--timesteps", type=int, default=100_000)
    parser.add_argument("--extractor", choices=("set", "flat"), default="set")
    parser.add_argument("--pooling", default="ada")
    parser.add_argument("--episodes", type=int, default=256)
    parser.add_argument("--out", type=Path, help="new folder for tables and plots")
    arguments = parser.parse_args()

    torch.set_num_threads(1)  # more are slower on tensors this small
    env = gymnasium.make("marl_pool/simple_centroid-v0", counts=SMALL)
    network = {"pooling": arguments.pooling, "encoder": "identity", "dim": 64}
    extractor: dict[str, object] = {"features_extractor_class": SetExtractor}
    extractor["features_extractor_kwargs"] = network
    is_set = arguments.extractor == "set"
    model = PPO(
        "MultiInputPolicy",
        env,
        n_steps=1024,
        gamma=0.9,
        seed=0,
        policy_kwargs=extractor if is_set else None,
    )
    model.learn(arguments.timesteps)

    marl_pool.evaluate(
        AnySizeModel(model) if is_set else model,
        env={"name": "simple_centroid", "counts": SMALL},
        suite="quick",
        episodes=arguments.episodes,
        title=f"Stable-Baselines3 PPO, {arguments.extractor}",
        out=arguments.out,
    )
    if is_set:
        marl_pool.evaluate(
            AnySizeModel(model),
            env={"name": "simple_centroid", "counts": LARGE},
            suite={"perturbations": []},
            episodes=arguments.episodes,
            title=f"with {LARGE} instead of {SMALL}",
        )


if __name__ == "__main__":
    main()
