"""Models from other libraries, measured in the environment's own space."""

from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

import marl_pool
from marl_pool.envs.pettingzoo.gymnasium_ids import env_options
from marl_pool.evaluation.callable_policy import _layout_mismatch
from marl_pool.evaluation.measure import EvaluationResults
from marl_pool.observations.make import make_view
from marl_pool.observations.view import TokenOptions
from marl_pool.utils.errors import InputError

SIZE = 4
HIDDEN = SIZE
"""Action of a model that reads a row which is not there."""


class Roll(gymnasium.Env):
    """Row i holds the number i; in step i the action i earns 1."""

    observation_space = spaces.Box(0, SIZE, (SIZE, 2), np.float32)
    action_space = spaces.Discrete(SIZE + 1)

    def _observe(self) -> np.ndarray:
        # The second column is the number; the first says that the row is present.
        numbers = np.stack([np.ones(SIZE), np.arange(SIZE)], 1)
        return np.roll(numbers, self.time, 0).astype(np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return self._observe(), {}

    def step(self, action):
        reward = float(action == 0)
        self.time += 1
        return self._observe(), reward, self.time == SIZE, False, {}


class Row:
    """Reads the first row at first, then the second, and so on: where 0 has moved."""

    def __init__(self, state: Any = None) -> None:
        self.state, self.time, self.modes = state, 0, set()

    def predict(self, observation, deterministic=False):
        self.modes.add(deterministic)
        assert observation.shape[1:] == (SIZE, 2)
        assert observation.dtype == np.float32
        present, number = observation[:, self.time % SIZE].T
        self.time += 1
        return np.where(present > 0, number, HIDDEN).astype(np.int64), self.state


def smallest(observation: np.ndarray) -> np.ndarray:
    """Read the set in any order."""
    present, number = observation[..., 0] > 0, observation[..., 1]
    return np.where(present, number, HIDDEN).min(1).astype(np.int64)


def evaluate(model: Any, env: Any = Roll, **options: Any) -> EvaluationResults:
    if env is Roll:
        env = {"name": "pettingzoo", "module": Roll, "presence": 0}
    arguments = {"episodes": 200, "threads": 1, **options}
    return marl_pool.evaluate(model, env, **arguments)


def suite(*perturbations: tuple[str, float]) -> dict[str, Any]:
    return {
        "perturbations": [
            {"name": name, "severities": [severity]} for name, severity in perturbations
        ]
    }


def test_returns_of_a_model_that_reads_places_are_those_of_a_random_permutation():
    model = Row()
    measured = evaluate(model, suite=suite(("shuffle", 1.0), ("occlude", 0.5)))
    clean, shuffled, hidden = measured.results[:3]
    assert clean.mean == SIZE
    # The number of fixed points: 1 on average, with a variance of 1, and never 3.
    assert shuffled.mean == pytest.approx(1, abs=4 / 200**0.5)
    assert {*measured.returns[1].tolist()} == {0, 1, 2, 4}
    assert model.modes == {True}
    # A hidden row reads as absent.
    assert {*measured.returns[2].tolist()} <= {*range(SIZE + 1)}
    assert hidden.mean == pytest.approx(2, abs=0.5)


def test_a_model_that_reads_the_set_loses_nothing_by_its_order():
    clean, shuffled, hidden = evaluate(
        smallest, suite=suite(("shuffle", 1.0), ("occlude", 0.5))
    ).results[:3]
    assert (clean.mean, shuffled.drop) == (SIZE, 0)
    # Half of the rows are gone, and with them 0 in half of the episodes.
    assert hidden.mean == pytest.approx(SIZE / 2, abs=4 * 2 / 200**0.5)


REASONS = {
    "shuffle": "every token has its own place",
    "occlude": "cannot say that a token is absent",
    "duplicate": "the observation space holds 1 of feature_",
}


def test_what_a_vector_cannot_express_is_a_row_with_the_reason():
    rows = evaluate(
        lambda observation: np.zeros(len(observation), np.int64),
        "CartPole-v1",
        episodes=2,
        suite=suite(*((name, 1.0) for name in REASONS), ("jitter", 1.0)),
    ).results
    by_name = {row.perturbation: row for row in rows if row.policy == "trained"}
    for name, reason in REASONS.items():
        assert reason in by_name[name].missing
    assert by_name["jitter"].missing == ""


def varied(rows: int = SIZE, high: float = SIZE, **box: Any) -> type[Roll]:
    """Return `Roll` with another space, and zeros in rows that it lacks or adds."""
    space = spaces.Box(0, high, **{"shape": (rows, 2), "dtype": np.float32} | box)

    class Varied(Roll):
        observation_space = space

        def _observe(self) -> np.ndarray:
            observation, numbers = np.zeros(space.shape), super()._observe()
            shared = min(rows, SIZE)
            observation[:shared, :2] = numbers[:shared]
            return observation.astype(space.dtype)

    return Varied


@pytest.mark.parametrize("padding", [{"presence": 0}, {"padding": "zero_rows"}])
@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (Roll, ""),
        (varied(rows=SIZE - 1), ""),
        (varied(rows=SIZE + 1), ""),
        (varied(high=SIZE - 1), ""),
        (varied(rows=SIZE - 1, high=SIZE - 1), ""),
        (
            varied(high=2 * SIZE),
            "expected numbers of observation in [0, 8], got [0, 4]",
        ),
        (
            varied(rows=3, high=8),
            "expected numbers of observation in [0, 8], got [0, 4",
        ),
        (varied(dtype=np.float64), "dtype of observation = float64, got float32"),
        (varied(shape=(SIZE, 3)), "expected observations with features = 3, got 2"),
        ("gymnasium:CartPole-v1", "expected actions = a choice of 2, got a choice of"),
    ],
)
def test_another_env_must_have_the_spaces_of_the_function(module, reason, padding):
    changes = {"module": env_options(module)["module"]}
    if isinstance(module, str):
        changes |= dict.fromkeys(padding)
    env = {"name": "pettingzoo", "module": Roll, **padding}
    transfer = [{"label": "other", "env": changes}]
    rows = evaluate(smallest, env, suite={"transfer": transfer}, episodes=2).results
    (row,) = (r for r in rows if (r.label, r.policy) == ("other", "trained"))
    assert reason in row.missing
    assert bool(reason) == bool(row.missing)


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        (SIZE - 1, "cannot say that row is absent"),
        (SIZE + 1, "the observation space holds 4 of row, got 5"),
    ],
)
def test_rows_that_the_space_cannot_hold_are_named(rows, reason):
    transfer = [
        {"label": "other", "env": {"module": env_options(varied(rows))["module"]}}
    ]
    env = {"name": "pettingzoo", "module": Roll}
    results = evaluate(smallest, env, suite={"transfer": transfer}, episodes=2).results
    (row,) = (r for r in results if (r.label, r.policy) == ("other", "trained"))
    assert reason in row.missing


def scene(count: int, start: int) -> spaces.Space[Any]:
    """Return a space of ``count`` cars and a choice."""
    return spaces.Dict(
        cars=spaces.Box(-1, 1, (count, 3)), kind=spaces.Discrete(3, start=start)
    )


@pytest.mark.parametrize(
    ("space", "reason"),
    [
        (scene(4, 0), ""),
        (scene(2, 0), ""),
        (scene(4, 1), "expected numbers of kind in [1, 3], got [0, 2]"),
        (
            spaces.Dict(cars=spaces.Box(-1, 1, (4, 3))),
            "with types = row, got cars, kind",
        ),
    ],
)
def test_layouts_of_dicts(space, reason):
    views = map(make_view, (space, scene(4, 0)))
    actual = _layout_mismatch(*views)
    assert reason in actual
    assert bool(reason) == bool(actual)


@pytest.mark.parametrize("count", [4, 2])
def test_slices_may_hold_fewer_rows(count):
    views = [
        make_view(
            spaces.Box(-1, 1, (2 + 3 * number,)),
            TokenOptions(
                slices={
                    "self": (0, 2),
                    "cars": {"start": 2, "count": number, "features": 3},
                }
            ),
        )
        for number in (count, 4)
    ]
    assert _layout_mismatch(*views) == ""


@pytest.mark.parametrize(
    "env",
    [
        "CartPole-v1",
        "gymnasium:CartPole-v1",
        partial(gymnasium.make, "CartPole-v1"),
        gymnasium.make("CartPole-v1"),
        {"name": "pettingzoo", "module": "CartPole-v1"},
    ],
)
def test_an_env_is_an_id_or_whatever_makes_it(env):
    def act(observation: np.ndarray) -> np.ndarray:
        assert observation.shape[1:] == (4,)
        return (observation[:, 2] > 0).astype(np.int64)

    clean = evaluate(act, env, episodes=3, suite={"perturbations": []}).results[0]
    assert clean.mean > 20


def test_agents_of_pettingzoo_see_their_own_observations():
    def act(observation: np.ndarray) -> np.ndarray:
        assert observation.shape[1:] == (18,)
        return np.zeros(len(observation), np.int64)

    env = {"name": "pettingzoo", "module": "mpe2.simple_spread_v3", "max_steps": 3}
    rows = evaluate(act, env, episodes=2, suite=suite(("shuffle", 1.0))).results
    # Three landmarks are alike, so that their order can change.
    assert [row.missing for row in rows[:2]] == ["", ""]


@pytest.mark.parametrize(
    ("model", "env", "message"),
    [
        (Row(state=3), Roll, "expected a model without memory, got Row"),
        (3, Roll, "expected a function of observations, a model with predict"),
        (Row(), Roll(), "env: expected a function that makes .* got a single Roll"),
        (Row(), 3, "env: expected a name, an id of Gymnasium, .* got int"),
        (Row(), "CartPol-v1", "Did you mean 'CartPole-v1'"),
        (
            Row(),
            {
                "name": "pettingzoo",
                "module": "CartPole-v1",
                "slices": {"self": [0, 2]},
            },
            "slices: expected every number of the observation in a slice",
        ),
    ],
)
def test_wrong_arguments_are_one_line(model, env, message):
    with pytest.raises(InputError, match=message) as caught:
        evaluate(model, env, episodes=2, suite={"perturbations": []})
    assert "\n" not in str(caught.value)


def test_a_wrong_env_leaves_no_folder(tmp_path) -> None:
    with pytest.raises(InputError, match="nowhere"):
        evaluate(lambda *_: 0, "nowhere", out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
