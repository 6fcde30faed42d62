"""PPO's dropout: refused where the encoder has none, unless a preset set it."""

import pytest

from marl_pool.config import compose, fit_batch
from marl_pool.training.settings import TrainConfig
from marl_pool.utils.errors import InputError


def lines_of(*overrides: str) -> list[str]:
    config = TrainConfig.from_plain(compose("train", overrides))
    return fit_batch("train", config, overrides)[1]


@pytest.mark.parametrize("encoder", ["identity", "swarm"])
def test_a_dropout_without_effect_is_refused_or_reported(encoder):
    with pytest.raises(InputError) as caught:
        lines_of(f"encoder={encoder}", "ppo.dropout=0.5")
    expected = f"ppo.dropout: expected 0 with encoder={encoder}, which has no dropout"
    assert str(caught.value) == f"{expected}, got 0.5"
    (line,) = lines_of(f"encoder={encoder}", "ppo=paper")
    expected = "ppo.dropout: 0.1 of ppo=paper has no effect, as"
    assert line == f"{expected} encoder={encoder} has none"
    assert not lines_of(f"encoder={encoder}", "ppo=paper", "ppo.dropout=0")


@pytest.mark.parametrize("encoder", ["transformer", "learned_merging"])
def test_encoders_that_have_dropout_accept_it(encoder):
    assert not lines_of(f"encoder={encoder}", "ppo.dropout=0.5")
