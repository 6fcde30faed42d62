"""PPO's dropout: a line where the encoder has none."""

import pytest

from marl_pool.config import compose, fit_batch
from marl_pool.training.settings import TrainConfig


def lines_of(*overrides: str) -> list[str]:
    config = TrainConfig.from_plain(compose("train", overrides))
    return fit_batch("train", config, overrides)[1]


@pytest.mark.parametrize("encoder", ["identity", "swarm"])
@pytest.mark.parametrize("dropout", ["ppo.dropout=0.1", "ppo=paper"])
def test_a_dropout_without_effect_is_reported(encoder, dropout):
    (line,) = lines_of(f"encoder={encoder}", dropout)
    expected = "ppo.dropout: 0.1 has no effect, as"
    assert line == f"{expected} encoder={encoder} has no dropout"
    assert not lines_of(f"encoder={encoder}", dropout, "ppo.dropout=0")


@pytest.mark.parametrize("encoder", ["transformer", "learned_merging"])
def test_encoders_that_have_dropout_accept_it(encoder):
    assert not lines_of(f"encoder={encoder}", "ppo.dropout=0.5")
