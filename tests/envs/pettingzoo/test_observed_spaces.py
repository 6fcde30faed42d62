"""PettingZoo and Gymnasium envs that observe any space, and the options about it."""

import sys
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from helpers.changing_agents import ChangingAgents
from helpers.tables import yaml_cases
from marl_pool.envs import make_batched_env
from marl_pool.envs.base import BatchedEnv
from marl_pool.perturbations import make_perturbation
from marl_pool.policies import make_policy
from marl_pool.rollout import Rollout
from marl_pool.utils.errors import InputError

ROWS = f"{__name__}:Rows"
ROBOTS = f"{__name__}:Robots"


class Rows(ChangingAgents):
    """Agents that see rows: presence, two coordinates, speed; and a wolf one less."""

    def __init__(self, **options):
        super().__init__(**{"death": 0.0, "alone": 0.0, **options})

    def observation_space(self, agent):
        return spaces.Box(0, 9, (4 - agent.startswith("wolf"), 4), np.float32)

    def _observe(self, agents):
        rows = np.zeros((4, 4), np.float32)
        rows[:3] = [[1, 2, 3, 4], [1, 5, 6, 0], [0, 7, 8, 9]]
        return {a: rows[: self.observation_space(a).shape[0]] for a in agents}


def batched(module: str, num_envs: int = 2, **options: Any) -> BatchedEnv:
    env = make_batched_env("pettingzoo", num_envs, module=module, **options)
    env.reset()
    return env


def test_rows_are_tokens_of_their_groups():
    env = batched(ROWS, presence=0)
    for name, count in (("wolf", 3), ("hen", 4)):
        assert env.groups[name].tokens.num_tokens == count
        present = env.active[name][..., None]
        padding = torch.tensor([False, False, True, True])[:count]
        assert (env.observe()[name].padding == (padding | ~present)).all()


def test_options_are_those_of_all_groups_or_of_each():
    env = batched(
        ROWS,
        padding={"hen": "zero_rows"},
        presence={"wolf": 0},
        token_types={"hen": ["self", "b", "b", "c"], "wolf": ["w"]},
        signal_types={"hen": ["b"]},
        positions=[1, 2],
    )
    hen, wolf = env.groups["hen"].tokens, env.groups["wolf"].tokens
    assert hen.type_names == ("self", "b", "c")
    assert (hen.has_self, wolf.has_self) == (True, False)
    assert (hen.signal_types, wolf.signal_types) == (("b",), ())
    assert hen.positions == wolf.positions == (1, 2)
    present = env.active["hen"]
    tokens = env.observe()["hen"]
    assert tokens.padding[present].any(0).tolist() == [False, False, False, True]
    assert tokens.types[0, 0].tolist() == [0, 1, 1, 2]


class Basket(gymnasium.Env):
    """An agent that sees two kinds of fruit, of any number."""

    list_of = spaces.Sequence(spaces.Box(0, 1, (2,), np.float32))
    observation_space = spaces.Dict(apples=list_of, plums=list_of)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return {"apples": (np.ones(2, np.float32),) * 3, "plums": ()}, {}

    def step(self, action):
        return self.reset()[0], 0.0, False, False, {}


@pytest.mark.parametrize("lengths", [{"apples": 4, "plums": 2}, {"plums": 2}, {}])
@pytest.mark.parametrize("by_group", [True, False])
def test_the_only_group_needs_no_name_for_numbers_of_tokens(lengths, by_group):
    options = {"max_tokens": {"agent": lengths} if by_group else lengths}
    if len(lengths) < 2:
        with pytest.raises(InputError, match="a number for each of apples, plums"):
            batched(f"{__name__}:Basket", max_steps=5, **options)
        return
    env = batched(f"{__name__}:Basket", max_steps=5, **options)
    assert env.groups["agent"].tokens.num_tokens == 6
    present = ~env.observe()["agent"].padding
    assert present.sum(-1).tolist() == [[3], [3]]


def test_named_types_and_positions_make_distractors_and_signal_possible():
    env = batched(
        ROWS,
        presence=0,
        token_types={"hen": ["self", "b", "b", "c"], "wolf": ["self", "b", "c"]},
        signal_types=["self", "b"],
        positions=[1, 2],
    )
    signal = env.signal()["hen"][env.active["hen"]]
    assert signal.tolist() == [[True, True, False, False]] * len(signal)
    specs = {name: group.tokens for name, group in env.groups.items()}
    inject = make_perturbation("inject", specs=specs, count=2, token_type="b")
    tokens = env.observe()["hen"]
    state = inject.start(tokens, torch.arange(2))
    view, _ = inject(tokens, state)
    added = ~view.padding[..., 4:] & env.active["hen"][..., None]
    assert added.any()
    # A distractor stands beside a token of its type, and copies its other features.
    assert view.features[..., 4:, 0][added].unique().tolist() == [1]
    assert not view.features[..., 4:, 1:3][added].eq(view.features[0, 0, 1, 1:3]).all()
    drop = make_perturbation("occlude", specs=specs, among="noise", severity=1.0)
    state = drop.start(tokens, torch.arange(2))
    assert drop(tokens, state)[0].padding[..., 3].all()


def test_a_rollout_perturbs_each_group_by_its_own_tokens():
    names = {"hen": ["self", "b", "b", "c"], "wolf": ["a", "b", "c"]}
    env = batched(ROWS, presence=0, token_types=names)
    specs = {name: group.tokens for name, group in env.groups.items()}
    policies = {
        name: make_policy(
            group.tokens, group.actions, encoder={"name": "transformer", "dim": 8}
        )
        for name, group in env.groups.items()
    }
    occlude = make_perturbation("occlude", specs=specs, severity=1.0)
    tokens = Rollout(env, policies, perturbation=occlude).tokens
    for name, perceived in tokens.items():
        remaining = (~perceived.padding).sum(-1)[env.active[name]]
        # A hen is left with itself, a wolf with nothing.
        assert (remaining == (name == "hen")).all()


class Observed(ChangingAgents):
    """Hens that observe a sample of a space."""

    SPACES: ClassVar = {
        "bits": spaces.MultiBinary(3),
        "integers": spaces.Box(0, 9, (3,), np.int64),
        "bit image": spaces.MultiBinary([3, 4, 2]),
        "bytes": spaces.Box(0, 255, (3,), np.uint8),
        "image": spaces.Box(0, 9, (4, 4, 3), np.float64),
        "counts": spaces.Box(0, 9, (4, 4, 3), np.int16),
        "choice": spaces.Discrete(4, start=2),
        "tuple": spaces.Tuple([spaces.Discrete(2), spaces.MultiBinary(3)]),
        "tokens": spaces.Dict(
            features=spaces.MultiBinary([2, 3]),
            types=spaces.MultiDiscrete([2, 2]),
            padding=spaces.MultiBinary(2),
        ),
    }

    def __init__(self, kind):
        super().__init__(wolves=0, hens=2, death=0.1)
        self.space = self.SPACES[kind]

    def observation_space(self, agent):
        return self.space

    def _observe(self, agents):
        self.space.seed(self.time)
        return {agent: self.space.sample() for agent in agents}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", Observed.SPACES)
def test_any_space_becomes_numbers_of_the_dtype_asked_for(kind, dtype):
    env = batched(f"{__name__}:Observed", options={"kind": kind}, dtype=dtype)
    for step in range(4):
        tokens = env.observe()["hen"]
        assert tokens.features.dtype == dtype
        assert tokens.features.isfinite().all()
        # An absent agent observes only padding.
        assert tokens.padding[~env.active["hen"]].all()
        rewards = env.step({"hen": torch.full((2, 2), step % 3)}).rewards["hen"]
        assert rewards.dtype == dtype
    loaded = batched(f"{__name__}:Observed", options={"kind": kind}, dtype=dtype)
    loaded.load_state_dict(env.state_dict())
    for part, restored in zip(
        env.observe()["hen"].parts, loaded.observe()["hen"].parts, strict=True
    ):
        assert part.equal(restored)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"presence": 4}, r"env.presence: .*below 4, got \[4\] \(group"),
    ({"presence": -1}, "env.presence: expected an integer >= 0"),
    ({"presence": {"fox": 0}}, "env.presence: .*groups wolf, hen, got fox"),
    ({"presence": {"hen": "x"}}, "env.presence: expected .*mapping .each an integer"),
    ({"padding": "zeros"}, "env.padding: expected zero_rows"),
    ({"patch": 0}, "env.patch: expected an integer >= 1"),
    ({"patch": {"hen": 2}, "presence": 0}, "env.presence: expected null.*group 'hen'"),
    ({"channels": "middle"}, "env.channels: expected first, last"),
    ({"token_types": ["a", "b"]}, r"env.token_types: expected 1 name.*\(group 'wolf'"),
    ({"signal_types": ["b"]}, "env.signal_types: expected some of row, got b"),
    ({"positions": [9]}, "env.positions: .*below 4"),
    ({"positions": 1}, "env.positions: expected a list"),
    ({"tokenizer": "features"}, "env.tokenizer: expected null.*no vector, got 'feat"),
]


@pytest.mark.parametrize(("options", "message"), WRONG)
def test_options_that_do_not_fit_are_refused_in_one_line(options, message):
    with pytest.raises(InputError, match=message) as caught:
        make_batched_env("pettingzoo", 1, module=ROWS, **options)
    assert "\n" not in str(caught.value)


class TooLarge(Rows):
    """Rows of one agent leave their space after some steps."""

    def __init__(self):
        super().__init__(wolves=0, hens=2, birth=1.0)

    def _observe(self, agents):
        observations = super()._observe(agents)
        if self.time == 2:
            observations["hen_1"] = np.full((4, 4), 10.0)
        return observations


def test_a_number_outside_of_its_space_in_mid_episode_is_refused():
    env = batched(f"{__name__}:TooLarge")
    actions = {"hen": torch.zeros(2, 2, dtype=torch.int64)}
    env.step(actions)
    message = (
        r"^env.module: step 2: agent 'hen_1': expected numbers in \[0, 9\].*got 10 at "
        r"\[0, 0\]"
    )
    with pytest.raises(InputError, match=message):
        env.step(actions)


# Gymnasium's


class Robots(gymnasium.Env):
    """Two robots in Tuples, as in level-based foraging."""

    def __init__(self, rewards=2, render_mode=None):
        self.rewards, self.render_mode = rewards, render_mode
        space = spaces.Box(0, 9, (2,), np.float32)
        self.observation_space = spaces.Tuple([space, space])
        self.action_space = spaces.Tuple([spaces.Discrete(2), spaces.Discrete(2)])

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return self._seen((0, 0)), {}

    def step(self, actions):
        self.time += 1
        rewards, over = [*map(float, actions)][: self.rewards], self.time == 3
        return self._seen(actions), rewards, False, [over, over], {}

    def _seen(self, actions):
        return tuple(np.array([self.time, a], np.float32) for a in actions)


def test_a_gymnasium_env_of_tuples_has_several_agents():
    env = batched(ROBOTS)
    assert env.groups["agent"].num_agents == 2
    step = env.step({"agent": torch.tensor([[0, 1], [1, 1]])})
    assert step.rewards["agent"].tolist() == [[0, 1], [1, 1]]
    assert env.observe()["agent"].features[0, :, :, 0].tolist() == [[1, 0], [1, 1]]
    env.step({"agent": torch.tensor([[0, 1], [1, 1]])})
    step = env.step({"agent": torch.tensor([[0, 1], [1, 1]])})
    assert step.truncated.all()
    assert not step.terminated.any()
    team = batched(ROBOTS, options={"rewards": 1})
    step = team.step({"agent": torch.tensor([[0, 1], [1, 0]])})
    assert step.rewards["agent"].tolist() == [[0, 0], [1, 1]]


class Broken(Robots):
    """An env whose results break Gymnasium's API."""

    FAULTS: ClassVar[dict[str, Any]] = {
        "old api": lambda obs, *_: (obs, [0.0, 0.0], False, {}),
        "no tuple": lambda obs, *_: obs[0],
        "short": lambda obs, *tail: (obs[:1], *tail),
        "single": lambda obs, *tail: (obs[0][0], *tail),
        "no reward": lambda obs, _, *tail: (obs, None, *tail),
        "many rewards": lambda obs, _, *tail: (obs, [0.0] * 3, *tail),
        "apart": lambda obs, reward, *_: (obs, reward, [True, False], False, {}),
        "no flag": lambda obs, reward, *_: (obs, reward, None, False, {}),
    }

    def __init__(self, fault, render_mode=None):
        super().__init__(render_mode=render_mode)
        self.fault = fault

    def reset(self, *, seed=None, options=None):
        result = super().reset(seed=seed)
        return result[0] if self.fault == "old reset" else result

    def step(self, actions):
        return self.FAULTS[self.fault](*super().step(actions))


@yaml_cases("fault, message")
def test_results_that_are_not_gymnasiums_are_refused_in_one_line(fault, message):
    actions = {"agent": torch.zeros(1, 2, dtype=torch.int64)}
    with pytest.raises(InputError, match=f"^env.module: {message}") as caught:
        batched(f"{__name__}:Broken", 1, options={"fault": fault}).step(actions)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("module", "tokens", "features"),
    [("gymnasium.envs:CartPole-v1", 4, 1), ("gymnasium.envs:Taxi-v3", 1, 500)],
)
def test_an_id_of_gymnasium_is_an_env_of_one_agent(module, tokens, features):
    env = batched(module)
    spec = env.groups["agent"].tokens
    assert (spec.num_tokens, spec.num_features) == (tokens, features)
    assert env.groups["agent"].num_agents == 1
    env.step({"agent": torch.zeros(2, 1, dtype=torch.int64)})


def test_an_unknown_id_of_gymnasium_is_refused():
    message = r"or package:id of Gymnasium; .*'Taxi-v9'. Did you mean 'Taxi-v\d'\?"
    with pytest.raises(InputError, match=message):
        make_batched_env("pettingzoo", 1, module="gymnasium.envs:Taxi-v9")


@pytest.mark.parametrize(
    ("module", "extra"),
    [
        ("magent2.environments.battle_v4", "zoo"),
        ("rware:x", "zoo"),
        ("mpe2.simple_spread_v3", "mpe"),
    ],
)
def test_a_missing_collection_names_its_extra(monkeypatch, module, extra):
    package = module.partition(":")[0].partition(".")[0]
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(InputError, match=rf'pip install "marl-pool\[{extra}\]"'):
        make_batched_env("pettingzoo", 1, module=module)
