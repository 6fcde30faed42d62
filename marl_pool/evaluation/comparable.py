"""Which runs may stand beside each other."""

import itertools
from collections.abc import Sequence

from marl_pool.runs import Run
from marl_pool.utils.errors import InputError

SHARED = ("name", "max_steps")
"""Options of the env that runs which are compared share, beside those of the reward."""


def require_comparable(runs: Sequence[Run]) -> None:
    """Refuse runs of different tasks: their returns have no common scale.

    Args:
        runs: those whose task is known; a bare policy's is what it is played in.

    Raises:
        InputError: another env, horizon or reward, or one run given twice.
    """
    if len({run.path.resolve() for run in runs}) < len(runs):
        raise InputError("expected different runs, got one of them twice")
    for first, run in itertools.pairwise(runs):
        one, other = first.config["env"], run.config["env"]
        rewards = (key for key in {**one, **other} if key.startswith("reward"))
        keys = [*SHARED, *rewards]
        for key in keys:
            if one.get(key) != other.get(key):
                raise InputError(
                    f"runs that cannot be compared: env.{key} is {one.get(key)} in "
                    f"{first.path} and {other.get(key)} in {run.path}"
                )
