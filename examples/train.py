"""Train a policy with PPO, load it, and measure how robust it is.

    pip install '.[rllib,plots]'
    python examples/train.py                                  # a million steps
    python examples/train.py pooling=max seed=1 total_steps=1e6

Arguments are overrides, as for ``marl-pool train``. The run goes into ``runs/``.
"""

import argparse

import marl_pool


def main() -> None:
    """Train on the given overrides, then play the result under perturbations."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("overrides", nargs="*", help="as for marl-pool train")
    run = marl_pool.train(
        "experiment=simple_centroid",
        "pooling=ada",
        "total_steps=1_000_000",
        "checkpoint.every=10",
        "checkpoint.keep=1",
        *parser.parse_args().overrides,
    )
    policy = marl_pool.load_policy(run.policy_dir)  # needs no ray
    print(f"{run.path}: {sum(p.numel() for p in policy.parameters()):,} parameters")
    marl_pool.evaluate(
        policy,
        env=run.env,
        suite="quick",
        episodes=64,
        title=run.path.name,
        out=run.path / "quick",
    )


if __name__ == "__main__":
    main()
