"""The batch of PPO, fitted to the agents if the user did not set its size."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from marl_pool.config.compose import Origin, origin
from marl_pool.config.dropout import unused_dropout
from marl_pool.options.overrides import Override
from marl_pool.training.settings import RunConfig, TrainConfig
from marl_pool.utils.errors import InputError

BATCH, MINIBATCH = "ppo.batch_size", "ppo.minibatch_size"


def fit_batch(
    verb: str,
    config: RunConfig,
    overrides: Sequence[str | Override],
    config_dir: str | Path | None = None,
) -> tuple[RunConfig, list[str]]:
    """Round up a batch size that only the package's defaults or presets have set.

    Args:
        verb: what ``config`` was composed for.
        config: composed and checked.
        overrides: as the user typed them.
        config_dir: a folder of the user's own YAML files.

    Returns:
        The configuration, and a line about each size that differs from its preset and
        about `unused_dropout`. A configuration with other faults is returned as it is.
    """
    if not isinstance(config, TrainConfig):
        return config, []
    lines = unused_dropout(config)
    ppo = config.ppo

    def origin_of(key: str) -> Origin:
        return origin(verb, key, overrides, config_dir)

    minibatch = origin_of(MINIBATCH)
    if minibatch.option and minibatch.value not in (None, ppo.minibatch_size):
        lines.append(
            f"{MINIBATCH}: {minibatch.value} of {minibatch.option} becomes "
            f"{ppo.minibatch_size}, the whole batch"
        )
    batch = origin_of(BATCH)
    if not batch.option:
        return config, lines
    from marl_pool.envs.description import describe_env  # loads torch

    try:
        unit = config.batch_unit(describe_env(config.env))
    except InputError:
        return config, lines
    if unit and (shortfall := -ppo.batch_size % unit):
        size = ppo.batch_size + shortfall
        config = replace(config, ppo=replace(ppo, batch_size=size))
        lines.append(
            f"{BATCH}: {batch.value} of {batch.option} becomes {size}, "
            f"a multiple of {unit} (ppo.num_envs × runners × agents that learn)"
        )
    return config, lines
