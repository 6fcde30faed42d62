"""PPO's dropout, which only some encoders have."""

from marl_pool.config.sections import GROUPS
from marl_pool.options.names import resolve
from marl_pool.options.plugins import load
from marl_pool.options.signatures import options_of
from marl_pool.training.settings import TrainConfig


def unused_dropout(config: TrainConfig) -> list[str]:
    """Return a line about a dropout that the encoder lacks, if there is one."""
    name, group, dropout = config.encoder.name, GROUPS["encoder"], config.ppo.dropout
    encoder = resolve(name, group.names(), "encoder", load(group.base))
    if not dropout or "dropout" in options_of(encoder):
        return []
    return [f"ppo.dropout: {dropout} has no effect, as encoder={name} has no dropout"]
