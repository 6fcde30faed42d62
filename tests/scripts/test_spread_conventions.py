"""The script that measures simple spread in every convention."""

import pytest
import spread_conventions
import torch
from particle_anchors import LeastTotal
from scipy.optimize import linear_sum_assignment

from marl_pool.envs import make_batched_env


def test_the_conventions_convert_by_the_formulas_of_the_page():
    steps, table = 25, list(spread_conventions.rows([], 20))
    assert {row["agents"] for row in table} == {3, 8}
    for row in table:
        g, c, z, n = (row[key] for key in ("G", "C", "Z", "agents"))
        assert z == pytest.approx(0.5 * g - c / n, abs=0.02)
        assert row["ZS"] == pytest.approx(n * z, abs=0.05)
        assert row["O"] == pytest.approx(n * g - 2 * c - n * steps, abs=0.1)
        assert row["OO"] == pytest.approx(n * row["O"], abs=0.1)


def test_agents_steer_by_the_assignment_of_least_distance():
    count = 5
    env = make_batched_env("simple_spread", 4, num_agents=count, seed=2)
    env.reset()
    tokens = env.observe()["agent"]
    script = LeastTotal(env.groups["agent"])
    force = script.force(tokens)
    places = env.state[..., :2]
    for row in range(4):
        distance = torch.cdist(places[row, :count], places[row, count:])
        _, goals = linear_sum_assignment(distance.numpy())
        away = places[row, count:][goals] - places[row, :count]
        # All are at rest, so a force points straight at the goal.
        torch.testing.assert_close(force[row], away * 100)
