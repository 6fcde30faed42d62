"""Train on HighwayEnv's intersection with Stable-Baselines3, and draw the attention.

    pip install 'marl-pool[sb3,plots]' highway-env
    python examples/highway_attention.py --timesteps 20000 --out attention.png

Each row of an observation is a vehicle, the first one the agent's own; the column
``presence`` says which rows are used.
"""

import argparse
from pathlib import Path

import gymnasium
import highway_env  # noqa: F401, registers the ids
import numpy as np
from PIL import Image
from stable_baselines3 import PPO

import marl_pool
from marl_pool.adapters.sb3 import AnySizeModel, SetExtractor

REACH = 100  # meters that become 1 in an observation
VEHICLES = 15
CONFIG = {
    "observation": {
        "type": "Kinematics",
        "vehicles_count": VEHICLES,
        "features": ["presence", "x", "y", "vx", "vy", "cos_h", "sin_h"],
        "features_range": {"x": [-REACH, REACH], "y": [-REACH, REACH]},
        "absolute": True,
        "clip": False,
    },
    "offscreen_rendering": True,
}


def main() -> None:
    """Train, play until some vehicles have come close, and save a picture."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--timesteps", type=int, default=20_000)
    parser.add_argument("--steps", type=int, default=5, help="before the picture")
    parser.add_argument("--out", type=Path, default=Path("attention.png"))
    arguments = parser.parse_args()

    env = gymnasium.make("intersection-v2", render_mode="rgb_array", config=CONFIG)
    tokens = {"presence": 0, "token_types": ["self", *["vehicle"] * (VEHICLES - 1)]}
    options = {"pooling": {"name": "ada", "num_heads": 2}, "dim": 16, **tokens}
    extractor = {
        "features_extractor_class": SetExtractor,
        "features_extractor_kwargs": options,
    }
    model = PPO("MlpPolicy", env, n_steps=512, seed=0, policy_kwargs=extractor)
    model.learn(arguments.timesteps)

    set_model = AnySizeModel(model)
    observation, _ = env.reset(seed=0)
    for _ in range(arguments.steps):
        observation, *_ = env.step(set_model(observation))
    frame, surface = env.render(), env.unwrapped.viewer.sim_surface
    meters = REACH * observation[:, 1:3]
    pixels = np.array([surface.vec2pix(place) for place in meters])
    weights = set_model.attention_weights(observation)
    drawn = marl_pool.draw_attention(frame, pixels, weights, observer=pixels[0])
    Image.fromarray(drawn).save(arguments.out)


if __name__ == "__main__":
    main()
