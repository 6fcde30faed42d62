"""Put a run's best policy into the package, for `pretrained=NAME`.

python scripts/ship_policy.py RUN NAME
"""

import argparse

from marl_pool.policies.storage import load_modules, save_policies
from marl_pool.pretrained import FOLDER
from marl_pool.runs.run import Run


def main() -> None:
    """Copy the policy, with the environment that it acts in."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", help="folder of the run")
    parser.add_argument("name", help="what the policy is to be called")
    arguments = parser.parse_args()
    if (FOLDER / arguments.name).exists():
        parser.error(f"{arguments.name} is there already; remove it first")
    run = Run.open(arguments.run)
    modules, groups = load_modules(run.policy_path())
    save_policies(modules, groups, FOLDER / arguments.name, env=run.config["env"])
    print(FOLDER / arguments.name)


if __name__ == "__main__":
    main()
