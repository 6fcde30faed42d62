"""The policy network against the AdaPool paper's, with equal weights.

``golden/policy_network.json`` says how its numbers were made.
"""

import json
import re
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor

from helpers.paths import GOLDEN_FILES
from marl_pool.config import compose
from marl_pool.policies.token_policy import TokenPolicy
from marl_pool.tokens import Tokens, TokenSpec

GOLDEN = json.loads((GOLDEN_FILES / "policy_network.json").read_text())
CASES = [
    (env, head) for env in GOLDEN["worlds"] for head in ("ada", "avg", "max", "cls")
]
TOLERANCE = 1e-12

OUR_NAMES = {
    r"^type_embedding$": "network.embedding.types.weight",
    r"^input\.": "network.embedding.project.",
    r"^encoder\.": "network.encoder.layers.",
    r"feedforward\.in\.": "feedforward.0.",
    r"feedforward\.out\.": "feedforward.2.",
    r"^pooling\.token$": "network.pooling.tokens",
    r"^pooling\.": "network.pooling.",
    r"attention\.(query|key|value|out)$": r"attention.to_\1.weight",
}


@cache
def configuration(env: str, head: str) -> dict[str, Any]:
    # The preset of simple_tag has a wider encoder, which learns sooner.
    encoder = ["encoder=paper_tag"] if env == "simple_tag" else []
    return compose("train", [f"experiment={env}", f"pooling={head}", *encoder])


def policy_of(env: str, head: str, **options: Any) -> TokenPolicy:
    """Make an experiment's policy, with the options of its configuration."""
    config = configuration(env, head)
    size = GOLDEN["worlds"][env]["sizes"]
    num_logits, num_types = size["logits"], size["num_types"]
    # A Gaussian has two logits for each action.
    space: spaces.Space = spaces.Discrete(num_logits)
    if size["continuous"]:
        space = spaces.Box(0, 1, (num_logits // 2,))
    spec = TokenSpec(6, size["features"], tuple(f"type {i}" for i in range(num_types)))
    parts = {key: config[key] for key in ("encoder", "pooling")}
    policy = TokenPolicy(spec, space, **parts, **{**config["policy"], **options})
    return policy.double().eval()


def published_weights(env: str, head: str) -> dict[str, Tensor]:
    """Return the parameters behind the golden numbers, by our names."""
    rng = np.random.RandomState(GOLDEN["seed"])
    weights: dict[str, Tensor] = {}
    for name, shape in GOLDEN["worlds"][env]["heads"][head]["parameters"]:
        parameter = torch.from_numpy(GOLDEN["scale"] * rng.standard_normal(shape))
        if name.endswith("norm.weight"):
            parameter += 1
        if name == "pooling.token":
            parameter = parameter[0]
        if name.endswith(".key_value"):
            stem = name.removesuffix("key_value")
            key, value = parameter.chunk(2)
            weights |= {our_name(stem + "key"): key, our_name(stem + "value"): value}
        else:
            weights[our_name(name)] = parameter
    return weights


def our_name(published: str) -> str:
    name = published
    for pattern, ours in OUR_NAMES.items():
        name = re.sub(pattern, ours, name)
    # In these two, activation functions take every other index.
    return re.sub(
        r"^(action|value)\.(\d)", lambda m: f"{m[1]}_head.{2 * int(m[2])}", name
    )


def tokens_of(env: str) -> Tokens:
    case = GOLDEN["worlds"][env]
    types = torch.tensor(case["types"])
    features = torch.tensor(case["features"], dtype=torch.float64)
    return Tokens(features, types, torch.zeros_like(types, dtype=torch.bool))


def largest_difference(policy: TokenPolicy, env: str, head: str) -> float:
    missing, unexpected = policy.load_state_dict(published_weights(env, head))
    assert not missing
    assert not unexpected
    published = GOLDEN["worlds"][env]["heads"][head]
    with torch.no_grad():
        logits, value = policy(tokens_of(env))
    expected = torch.tensor(published["logits"], dtype=torch.float64)
    errors = [(logits - expected).abs().max()]
    expected = torch.tensor(published["value"], dtype=torch.float64)
    errors.append((value - expected).abs().max())
    return float(max(errors))


@pytest.mark.parametrize(("env", "head"), CASES)
def test_equal_weights_give_the_published_logits_and_value(env: str, head: str) -> None:
    assert largest_difference(policy_of(env, head), env, head) < TOLERANCE


@pytest.mark.parametrize("change", [{"activation": "relu"}, {"input_activation": None}])
@pytest.mark.parametrize("env", GOLDEN["worlds"])
def test_without_either_gelu_the_results_differ(
    env: str, change: dict[str, Any]
) -> None:
    policy = policy_of(env, "ada", **change)
    assert largest_difference(policy, env, "ada") > 1e-2


def test_the_golden_log_stds_reach_the_clamp_in_every_head() -> None:
    for head, published in GOLDEN["worlds"]["simple_centroid"]["heads"].items():
        log_std = np.array(published["logits"])[:, 5:]
        assert np.abs(log_std).max() == 1, head
        assert np.abs(log_std).min() < 1, head
