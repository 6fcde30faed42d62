"""Measure how a trained policy degrades as its sensors fail.

    python examples/evaluate.py
    python examples/evaluate.py runs/max/policy --env simple_centroid --episodes 256

Without a folder it plays a CartPole agent that comes with the package. It does not need
ray.
"""

import argparse
from pathlib import Path

import marl_pool
from marl_pool.pretrained import pretrained_path

SUITE = {
    "perturbations": [
        {"name": "shuffle", "every": 25, "severities": [1.0]},
        {"name": "occlude", "severities": [0.2, 0.4]},
        {"name": "jitter", "severities": [0.1]},
    ]
}


def main() -> None:
    """Evaluate a policy folder and print each case's mean return."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    shipped = pretrained_path("cartpole_attention_neuron_reshuffled")
    parser.add_argument("policy", type=Path, nargs="?", default=shipped)
    parser.add_argument("--env", default="cartpole")
    parser.add_argument("--episodes", type=int, default=32)
    arguments = parser.parse_args()
    measured = marl_pool.evaluate(
        marl_pool.load_policy(arguments.policy),
        arguments.env,
        suite=SUITE,
        episodes=arguments.episodes,
    )
    for result in measured.results:
        case = f"{result.policy:>10}  {result.label:<16} {result.severity:4.2f}"
        interval = f"[{result.mean_low:.1f}, {result.mean_high:.1f}]"
        print(f"{case}  {result.mean:8.1f}  {interval}")


if __name__ == "__main__":
    main()
