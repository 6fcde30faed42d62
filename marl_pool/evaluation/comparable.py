"""Check that runs solve the same task, so that their returns can be compared."""

import itertools
from collections.abc import Sequence

from marl_pool.runs.run import Run
from marl_pool.utils.errors import InputError


def validate_comparable(runs: Sequence[Run]) -> None:
    """Reject runs of different tasks: their returns have no common scale.

    Raises:
        InputError: the runs differ in env, horizon or reward, or in the options of a
            PettingZoo environment, which may shape its reward; or a run is given twice.
    """
    if len({run.path.resolve() for run in runs}) < len(runs):
        raise InputError("expected different runs, got one of them twice")
    for first, second in itertools.pairwise(runs):
        first_env, second_env = first.env, second.env
        # The names of options that shape the reward begin with "reward".
        rewards = (
            key for key in {**first_env, **second_env} if key.startswith("reward")
        )
        for key in ("name", "module", "options", "max_steps", *rewards):
            if first_env.get(key) != second_env.get(key):
                raise InputError(
                    f"runs that cannot be compared: env.{key} is "
                    f"{first_env.get(key)} in {first.path} and "
                    f"{second_env.get(key)} in {second.path}"
                )
