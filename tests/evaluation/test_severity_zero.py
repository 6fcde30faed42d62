"""At severity 0 every perturbation gives the clean episodes' returns, bit for bit."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from helpers.evaluated import levels
from helpers.farm import FoxAndHens
from helpers.perturbed import VARIANTS
from marl_pool.envs import make_batched_env
from marl_pool.envs.base import BatchedEnv
from marl_pool.evaluation.measure import EvaluationResults, measure
from marl_pool.evaluation.target import to_float64
from marl_pool.perturbations import PERTURBATIONS
from marl_pool.perturbations.base import PerturbationState
from marl_pool.perturbations.readings import Jitter
from marl_pool.policies import make_policy
from marl_pool.tokens import Tokens

EPISODES = 6
SPECIFIC = ("among", "token_type", "features", "position_features", "scope")
"""Options that name parts of the tokens of other tests."""

TAG: dict[str, Any] = {"prey": "learned", "num_obstacles": 2, "max_steps": 6}
BUILDERS: dict[str, Callable[[], BatchedEnv]] = {
    "simple_centroid": partial(
        make_batched_env, "simple_centroid", EPISODES, counts="2-3-4", max_steps=6
    ),
    "simple_tag": partial(make_batched_env, "simple_tag", EPISODES, **TAG),
    "boxworld": partial(make_batched_env, "boxworld", EPISODES, max_steps=12),
    "cartpole": partial(make_batched_env, "cartpole", EPISODES, max_steps=20),
    "fox and hens": partial(FoxAndHens, EPISODES),
}
LACKING = {
    "boxworld": {"inject"},
    "cartpole": {"confuse", "inject"},
    "fox and hens": {"inject"},
}
"""Perturbations that an environment's tokens do not allow: marked gaps."""
QUICK = ("simple_centroid", "boxworld")
NOTICED = set(PERTURBATIONS) - {"shuffle"}


class Biased(Jitter):
    """A custom perturbation that is no identity at severity 0."""

    def __call__(
        self, tokens: Tokens, state: PerturbationState
    ) -> tuple[Tokens, PerturbationState]:
        return tokens._replace(features=tokens.features + 1e-3), state


def measure_untrained(env: str, *names: str) -> EvaluationResults:
    """Measure untrained policies under perturbations at severities 0 and 1."""
    make = BUILDERS[env]
    options: dict[str, Any] = {"pooling": "ada", "init_std": 0.3, "seed": 2}
    policies = {
        name: make_policy(group.tokens, group.action_space, **options)
        for name, group in make().groups.items()
    }
    entries: list[dict[str, Any]] = [{"name": name} for name in names]
    entries += [
        {"name": name, **options}
        for name, options in VARIANTS
        if name in names and options and not set(options) & set(SPECIFIC)
    ]
    swept = levels(*({**entry, "severities": [0.0, 1.0]} for entry in entries))
    return measure(to_float64(policies), make, swept)


# Quick runs have an environment that all perturbations fit, and one with gaps.
@pytest.mark.parametrize(
    "env",
    [
        *QUICK,
        *(pytest.param(n, marks=pytest.mark.slow) for n in BUILDERS if n not in QUICK),
    ],
)
def test_severity_0_returns_exactly_what_clean_episodes_do(env: str) -> None:
    measurement = measure_untrained(env, *PERTURBATIONS)
    clean = {
        row.group: returns
        for row, returns in zip(measurement.results, measurement.returns, strict=True)
        if row.perturbation == "clean"
    }
    gaps, changed = set(), set()
    for row, returns in zip(measurement.results, measurement.returns, strict=True):
        if row.missing:
            gaps.add(row.perturbation)
            assert np.isnan(returns).all()
        elif row.severity == 0:
            np.testing.assert_array_equal(returns, clean[row.group], row.label)
            assert row.drop == 0.0 or row.perturbation == "clean"
        elif not np.array_equal(returns, clean[row.group]):
            changed.add(row.perturbation)
    assert gaps == LACKING.get(env, set())
    # So they were in the loop: all that an invariant head can notice, it notices.
    assert changed if env != "simple_centroid" else changed == NOTICED


def test_a_perturbation_that_acts_at_severity_0_is_detected() -> None:
    measurement = measure_untrained("simple_centroid", f"{__name__}:Biased")
    clean, biased, _ = measurement.returns
    assert measurement.results[1].severity == 0
    assert not np.array_equal(clean, biased)
