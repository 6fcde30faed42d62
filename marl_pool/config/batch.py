"""The batch of PPO, fitted to the agents if the user did not set its size."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from marl_pool.config.compose import Config, Origin, origin
from marl_pool.options.overrides import Override
from marl_pool.training.settings import TrainConfig
from marl_pool.utils.errors import InputError

BATCH, MINIBATCH = "ppo.batch_size", "ppo.minibatch_size"


def fit_batch(
    verb: str,
    config: Mapping[str, Any],
    overrides: Sequence[str | Override],
    config_dir: str | Path | None = None,
) -> tuple[Config, list[str]]:
    """Round up a batch size that only the package's defaults or presets have set.

    Args:
        verb: what ``config`` was composed for.
        config: composed and checked.
        overrides: as the user typed them.
        config_dir: a folder of the user's own YAML files.

    Returns:
        The configuration, and a line about each size that differs from its preset. A
        configuration with other faults is returned as it is.
    """
    fitted, lines = dict(config), list[str]()
    if "ppo" not in fitted:
        return fitted, lines
    sizes = fitted["ppo"] = dict(fitted["ppo"])

    def origin_of(key: str) -> Origin:
        return origin(verb, key, overrides, config_dir)

    minibatch = origin_of(MINIBATCH)
    if minibatch.option and minibatch.value not in (None, sizes["minibatch_size"]):
        lines.append(
            f"{MINIBATCH}: {minibatch.value} of {minibatch.option} becomes "
            f"{sizes['minibatch_size']}, the whole batch"
        )
    batch = origin_of(BATCH)
    if not batch.option:
        return fitted, lines
    from marl_pool.envs.description import describe_env  # loads torch

    try:
        run_config = TrainConfig.from_plain(config)
        unit = run_config.batch_unit(describe_env(run_config.env))
    except InputError:
        return fitted, lines
    if unit and (shortfall := -sizes["batch_size"] % unit):
        sizes["batch_size"] += shortfall
        lines.append(
            f"{BATCH}: {batch.value} of {batch.option} becomes {sizes['batch_size']}, "
            f"a multiple of {unit} (ppo.num_envs × runners × agents that learn)"
        )
    return fitted, lines
