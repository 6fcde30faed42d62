"""PPO with policies that select tokens."""

from pathlib import Path

import pytest

pytest.importorskip("ray")

from helpers.ppo import run_of, weights_of
from marl_pool.config import compose
from marl_pool.policies.storage import load_policies
from marl_pool.utils.errors import InputError

TOY = [
    *("env=lbforaging", "env.choices=food", "env.max_steps=6", "policy.action=select"),
    *("ppo.num_envs=4", "ppo.batch_size=48", "ppo.minibatch_size=24"),
    *("ppo.num_epochs=2", "total_steps=48", "threads=1", "encoder.num_layers=1"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["perturbation=shuffle", "perturbation.every=1"],
        # More tokens than the environment has.
        ["perturbation=duplicate", "perturbation.severity=1.0"],
        ["critic=set"],
        ["critic=state", "policy.trunk=separate"],
        ["kernels=torch", "pooling=cls"],
    ],
    ids=lambda overrides: " ".join(overrides) or "plain",
)
def test_a_policy_that_selects_is_trained(tmp_path: Path, overrides: list[str]) -> None:
    run = run_of(tmp_path / "run", compose("train", [*TOY, *overrides]))
    row = run.rows()[0]
    assert row["agent/first_ratio_error"] < 1e-5
    weights = weights_of(run.policy_path("last"))
    key = next(name for name in weights if name.endswith("key.weight"))
    (policy,) = load_policies(run.policy_path("last")).values()
    assert policy.config["action"] == "select"
    assert weights[key].shape == policy.key.weight.shape
    # Biases are initialized to zero.
    assert weights[key.replace("weight", "bias")].abs().sum() > 0


@pytest.mark.parametrize("change", ["env.choices=moves", "ppo.token_dropout=0.2"])
def test_what_cannot_select_is_refused(tmp_path: Path, change: str) -> None:
    with pytest.raises(InputError, match="policy.action: expected head "):
        run_of(tmp_path / "run", compose("train", [*TOY, change]))
