"""PPO's dropout, which only some encoders have."""

from collections.abc import Sequence
from pathlib import Path

from marl_pool.config.compose import origin
from marl_pool.config.sections import GROUPS
from marl_pool.options.names import resolve
from marl_pool.options.overrides import Override
from marl_pool.options.plugins import load
from marl_pool.options.signatures import options_of
from marl_pool.training.settings import TrainConfig
from marl_pool.utils.errors import InputError

DROPOUT = "ppo.dropout"


def unused_dropout(
    verb: str,
    config: TrainConfig,
    overrides: Sequence[str | Override],
    config_dir: str | Path | None = None,
) -> list[str]:
    """Return a line about a preset's dropout that the encoder lacks, if there is one.

    See `fit_batch` for the arguments.

    Raises:
        InputError: the user set a dropout that the encoder lacks.
    """
    name, group, dropout = config.encoder.name, GROUPS["encoder"], config.ppo.dropout
    encoder = resolve(name, group.names(), "encoder", load(group.base))
    if not dropout or "dropout" in options_of(encoder):
        return []
    preset = origin(verb, DROPOUT, overrides, config_dir).option
    if not preset:
        raise InputError(
            f"{DROPOUT}: expected 0 with encoder={name}, which has no dropout, got "
            f"{dropout}"
        )
    return [
        f"{DROPOUT}: {dropout} of {preset} has no effect, as encoder={name} has none"
    ]
