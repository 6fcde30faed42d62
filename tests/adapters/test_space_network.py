"""The network that all adapters build, and errors for missing libraries."""

import importlib
import sys
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from helpers.samples import SPEC
from marl_pool.adapters.space_network import SpaceNetwork
from marl_pool.utils.errors import InputError

TOKENS = SPEC.space()
ROWS = spaces.Box(0, 1, (5, 3))


@pytest.mark.parametrize(
    ("space", "options", "message"),
    [
        (ROWS, {"pooling": "adda"}, "unknown pooling 'adda'"),
        (ROWS, {"pooling": {"name": "ada", "heads": 2}}, "option of pooling 'ada'"),
        (ROWS, {"pooling": "attention_neuron"}, "expected a head without memory"),
        (ROWS, {"encoder": "lstm", "num_heads": 2}, "option of encoder 'lstm'"),
        (ROWS, {"dim": "8"}, "set_network.dim: expected an integer >= 1"),
        (ROWS, {"dim": 8.5}, "set_network.dim: expected an integer"),
        (ROWS, {"dropout": 1.5}, "set_network.dropout: expected"),
        (ROWS, {"presense": 0}, "presense: unknown key.*Did you mean 'presence'"),
        (TOKENS, {"presence": 0}, "presence: expected null, since the observation"),
        (ROWS, {"presence": 3}, "presence: expected different indices"),
        (ROWS, {"presence": "x"}, "presence: expected"),
        (spaces.Text(5), {}, "a MultiDiscrete of the characters' numbers"),
        (spaces.Dict(action_mask=spaces.MultiBinary(3)), {}, "a Dict with"),
        (spaces.Dict(dict(list(TOKENS.items())[:2])), {}, "space: expected features, "),
    ],
)
def test_invalid_options_are_refused_in_one_line(
    space: spaces.Space, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message) as caught:
        SpaceNetwork(space, **options)
    assert "\n" not in str(caught.value)
    # Other options are named without Python's stars.
    assert "**" not in str(caught.value)


def test_padding_does_not_change_features() -> None:
    network = SpaceNetwork(TOKENS, dim=8, num_layers=1, num_heads=2)
    TOKENS.seed(0)
    samples = [TOKENS.sample() for _ in range(8)]
    tokens = {
        name: torch.as_tensor(np.stack([sample[name] for sample in samples]))
        for name in TOKENS
    }
    tokens["padding"][:, :3] = False
    tokens["padding"][:, 3:] = True
    expected = network(tokens)
    tokens["features"][:, 3:] = torch.nan
    tokens["types"][:, 3:] = -7
    assert torch.equal(network(tokens), expected)
    # Other numbers of slots than the space has.
    fewer = {name: part[:, :3] for name, part in tokens.items()}
    more = {name: torch.cat([part, part[:, 3:]], 1) for name, part in tokens.items()}
    for resized in (fewer, more):
        torch.testing.assert_close(network(resized), expected)
    tokens["features"][:, 0] += 1
    assert not torch.allclose(network(tokens), expected)


@pytest.mark.parametrize(
    ("adapter", "missing", "message"),
    [
        ("benchmarl", "benchmarl", "this needs benchmarl"),
        (
            "rllib",
            "ray.rllib.algorithms.algorithm_config",
            r'pip install "marl-pool\[rllib\]"',
        ),
        (
            "sb3",
            "stable_baselines3.common.base_class",
            r'pip install "marl-pool\[sb3\]"',
        ),
        ("torchrl", "torchrl.data", r'pip install "marl-pool\[torchrl\]"'),
        ("torchrl", "tensordict", r'pip install "marl-pool\[torchrl\]"'),
    ],
)
def test_a_missing_library_is_named(
    adapter: str, missing: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.delitem(sys.modules, f"marl_pool.adapters.{adapter}", raising=False)
    with pytest.raises(InputError, match=message):
        importlib.import_module(f"marl_pool.adapters.{adapter}")
