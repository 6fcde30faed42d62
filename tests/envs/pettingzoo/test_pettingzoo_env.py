"""Any PettingZoo env as a `BatchedEnv`: lives, seeds, replay, refusals, pictures.

``python tests/envs/pettingzoo/test_pettingzoo_env.py`` writes the golden file anew.
"""

import gc
import itertools
import json
import sys
import warnings
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from helpers.changing_agents import ChangingAgents
from helpers.paths import GOLDEN_FILES
from helpers.tables import yaml_cases
from marl_pool.envs import make_env
from marl_pool.envs.pettingzoo.env import PettingZooEnv
from marl_pool.envs.pettingzoo.env_copy import find_factory
from marl_pool.policies.base import Decision, Policy
from marl_pool.rollout import Rollout
from marl_pool.utils.errors import InputError
from marl_pool.utils.randomness import Purpose, stream_keys, uniform

pytestmark = [
    # PettingZoo's own test package imports its deprecated modules.
    pytest.mark.filterwarnings("ignore:The old environment creation API"),
    pytest.mark.filterwarnings("ignore:Observation is not a NumPy array"),
    pytest.mark.filterwarnings("ignore:Observation space for each agent probably"),
]

AGENTS = "helpers.changing_agents:ChangingAgents"
TAG = "mpe2.simple_tag_v3"
GOLDEN = GOLDEN_FILES / "pettingzoo.json"
GAMMA, LAMBDA = 0.9, 0.8


class Reader(Policy):
    """A policy whose actions and values are sums of its features, to expose mix-ups."""

    def __init__(self, space: spaces.Space) -> None:
        super().__init__()
        self.space = space

    def act(self, tokens, state=(), generator=None, explore=False) -> Decision:
        hidden = tokens.features.masked_fill(tokens.padding[..., None], 0)
        total = hidden.sum((-1, -2))
        if isinstance(self.space, spaces.Discrete):
            action = (total.round().abs().long() + 1) % int(self.space.n)
        else:
            action = (torch.stack([total.sin(), total.cos()], -1) * 8).round() / 8
        return Decision(action, -total, total, total[..., None], ())


def readers(env: PettingZooEnv) -> dict[str, Policy]:
    return {name: Reader(group.action_space) for name, group in env.groups.items()}


def reset_seed(seed: int, env: int, episode: int) -> int:
    key = stream_keys(seed, torch.tensor([env]), torch.tensor([episode]), Purpose.RESET)
    return int(uniform(key, 1) * (1 << 31))


def example_actions(env: PettingZooEnv, step: int) -> dict[str, Tensor]:
    """Return actions that depend only on environment number, agent and step."""
    actions = {}
    for name, group in env.groups.items():
        space = group.action_space
        wave = 5 * env.env_ids[:, None] + 3 * torch.arange(group.num_agents) + step
        if isinstance(space, spaces.Discrete):
            actions[name] = wave % int(space.n)
        else:
            place = torch.arange(space.shape[0])
            actions[name] = torch.sin(wave[..., None] + 2.0 * place)
    return actions


def run(env: PettingZooEnv, steps: int, first: int = 0) -> list[Any]:
    """Return everything that is visible in ``steps`` steps."""
    record = []
    for step in range(first, first + steps):
        result = env.step(example_actions(env, step))
        record.append((result, env.observe(), env.active))
    return record


def assert_same(actual: Any, expected: Any, rows: Any = slice(None)) -> None:
    """``actual`` in the environments ``rows`` equals ``expected``."""
    assert type(actual) is type(expected)
    if isinstance(actual, Tensor):
        assert actual[rows].equal(expected)
    elif isinstance(actual, dict):
        assert actual.keys() == expected.keys()
        for key in actual:
            assert_same(actual[key], expected[key], rows)
    elif actual is not None:  # an absent action mask
        for part, expected_part in zip(actual, expected, strict=True):
            assert_same(part, expected_part, rows)


# Lives, against naive bookkeeping: one env, one agent, one step at a time


def play(
    options: dict[str, Any], seed: int, env_id: int, steps: int, max_steps: int
) -> Iterator[dict[str, Any]]:
    """Play one environment by itself, recording agents, observations and rewards."""
    episode, env = 0, None
    while steps > 0:
        env = ChangingAgents(**options)
        obs, _ = env.reset(seed=reset_seed(seed, env_id, episode))
        before, time, over = list(env.agents), 0, False
        while not over and steps > 0:
            actions = {agent: naive_action(env, agent, obs[agent]) for agent in before}
            values = {agent: float(obs[agent].sum()) for agent in before}
            after, rewards, died, late, _ = env.step(actions)
            timeout = time + 1 == max_steps
            over = not env.agents or timeout
            # Agents that were truncated at the end would have gone on.
            last = [a for a in before if late[a] and not died[a]]
            on = list(env.agents) or last
            yield {
                "time": time,
                "seen": {agent: obs[agent] for agent in before},
                "actions": actions,
                "values": values,
                "rewards": rewards,
                "next": {a: float(after[a].sum()) for a in before if a in on},
                "goes_on": [] if over else [a for a in before if a in env.agents],
                "terminated": not on,
                "truncated": timeout or bool(on and over),
            }
            before, obs, time = list(env.agents), after, time + 1
            steps -= 1
        episode += 1


def naive_action(env: ChangingAgents, agent: str, observation: np.ndarray) -> Any:
    total = observation.sum()
    if agent.startswith("hen"):
        return (round(abs(float(total))) + 1) % 3
    return (np.array([np.sin(total), np.cos(total)], np.float32) * 8).round() / 8


def naive_chunks(steps: list[dict[str, Any]]) -> dict[Any, dict[str, Any]]:
    """Chunks by (agent, first step of the fragment), with their estimates."""
    chunks: dict[Any, dict[str, Any]] = {}
    running: dict[str, Any] = {}
    for index, step in enumerate(steps):
        for agent in step["seen"]:
            if agent not in running:
                running[agent] = (agent, index)
                chunks[running[agent]] = {
                    key: [] for key in ("seen", "actions", "values", "rewards", "next")
                }
                chunks[running[agent]]["time"] = step["time"]
            chunk = chunks[running[agent]]
            for key in ("seen", "actions", "values", "rewards"):
                chunk[key].append(step[key][agent])
            chunk["next"].append(step["next"].get(agent, 0.0))
            chunk["ends"] = step["terminated"], step["truncated"]
        running = {agent: running[agent] for agent in step["goes_on"]}
    for chunk in chunks.values():
        parts = zip(chunk["rewards"], chunk["next"], chunk["values"], strict=True)
        errors = [reward + GAMMA * after - value for reward, after, value in parts]
        chunk["advantages"] = [
            sum((GAMMA * LAMBDA) ** k * error for k, error in enumerate(errors[t:]))
            for t in range(len(errors))
        ]
    return chunks


@given(
    options=st.fixed_dictionaries(
        {
            "wolves": st.integers(0, 2),
            "hens": st.integers(1, 3),
            "death": st.sampled_from([0.0, 0.1, 0.4, 1.0]),
            "birth": st.sampled_from([0.0, 0.3, 0.9]),
            "alone": st.sampled_from([0.0, 0.2]),
            "horizon": st.integers(1, 7),
        }
    ),
    seed=st.integers(0, 1000),
    num_envs=st.integers(1, 4),
    max_steps=st.integers(1, 9),
    fragments=st.lists(st.integers(1, 8), min_size=1, max_size=3),
)
def test_births_and_deaths_do_not_corrupt_a_batch(
    options, seed, num_envs, max_steps, fragments
):
    env = PettingZooEnv(
        num_envs,
        module=AGENTS,
        options=options,
        max_steps=max_steps,
        seed=seed,
        dtype=torch.float64,
    )
    rollout = Rollout(env, readers(env))
    histories = [
        list(play(options, seed, number, sum(fragments), max_steps))
        for number in range(num_envs)
    ]
    for steps in fragments:
        compare(rollout, [rows[:steps] for rows in histories], steps)
        histories = [rows[steps:] for rows in histories]


def compare(rollout: Rollout, history: list[list[dict[str, Any]]], steps: int) -> None:
    """Compare one fragment's episode chunks with the naive bookkeeping."""
    from marl_pool.training.ppo.trajectories import estimate_advantages, to_episodes

    before = rollout.env.steps.numpy().copy()
    chunks: dict[Any, Any] = {}
    for group, part in rollout.steps(steps).items():
        dead = ~part.active
        assert not part.rewards[dead].any()
        assert part.tokens.padding[dead].all()
        assert not part.tokens.padding[part.active].any()
        advantages, targets = estimate_advantages(part, GAMMA, LAMBDA)
        for chunk in to_episodes(
            part,
            advantages,
            targets,
            group=group,
            module_id=group,
            prefix="p",
            first_steps=before,
        ):
            env, start = int(chunk.id_.split("-")[1]), int(chunk.id_.split("-")[-1])
            chunks[env, chunk.agent_id, start] = chunk
    expected = {
        (env, *key): chunk
        for env, rows in enumerate(history)
        for key, chunk in naive_chunks(rows).items()
    }
    assert chunks.keys() == expected.keys()
    for key, chunk in chunks.items():
        naive, length = expected[key], len(chunk)
        features = chunk.observations.data["features"][:length, :, 0]
        np.testing.assert_array_equal(features, np.stack(naive["seen"]))
        np.testing.assert_allclose(chunk.actions.data, np.stack(naive["actions"]), 1e-6)
        np.testing.assert_allclose(chunk.rewards.data, naive["rewards"], 1e-6)
        outputs = chunk.extra_model_outputs
        advantages, targets = outputs["advantages"].data, outputs["value_targets"].data
        np.testing.assert_allclose(advantages, naive["advantages"], 1e-5, 1e-5)
        whole = np.add(naive["advantages"], naive["values"])
        np.testing.assert_allclose(targets, whole, 1e-5, 1e-5)
        assert (chunk.is_terminated, chunk.is_truncated) == naive["ends"]
        assert chunk.t_started == naive["time"]


def test_changing_agents_die_are_born_and_end_in_every_way():
    """The property above would be empty if such things did not happen."""
    rows = [row for n in range(20) for row in play({}, 0, n, 40, 7)]
    events = {
        "death": any(set(r["seen"]) - set(r["next"]) for r in rows),
        "terminated": any(r["terminated"] for r in rows),
        "truncated": any(r["truncated"] for r in rows),
        "mixed": any(r["truncated"] and len(r["next"]) < len(r["seen"]) for r in rows),
        "born": any(
            set(later["seen"]) - set(row["goes_on"])
            for row, later in itertools.pairwise(rows)
            if later["time"]
        ),
    }
    assert all(events.values()), events


# Seeds and replay


def test_selected_envs_continue_independently_of_the_original():
    env, reference = (PettingZooEnv(4, module=AGENTS, seed=5) for _ in range(2))
    for instance in (env, reference):
        instance.reset()
        run(instance, 3)
    rows = torch.tensor([2, 0, 2])
    subset = env.select(rows)
    expected = run(reference, 4, first=3)
    # The copies are shared until both step; each must see its own future.
    assert_same(expected, run(subset, 4, first=3), rows)
    assert_same(expected, run(env, 4, first=3))
    env.reset()
    late = subset.select(torch.tensor([1]))
    assert_same(run(reference, 2, first=7), run(late, 2, first=7), slice(0, 1))


def test_nondeterministic_env_warns_on_replay():
    env = PettingZooEnv(1, module=f"{__name__}:Unsteady")
    env.reset()
    run(env, 2)
    state = env.state_dict()
    with pytest.warns(UserWarning, match="not deterministic"):
        env.load_state_dict(state)


def test_rewards_and_ends_are_the_env_s_own():
    from mpe2 import simple_tag_v3

    env = PettingZooEnv(2, module=TAG, seed=3, options={"max_cycles": 6})
    env.reset()
    for number in range(2):
        native = simple_tag_v3.parallel_env(max_cycles=6)
        native.reset(seed=reset_seed(3, number, 0))
        subset = env.select(torch.tensor([number]))
        for step in range(6):
            actions = example_actions(subset, step)
            flat = {
                f"{name}_{i}": int(action)
                for name, part in actions.items()
                for i, action in enumerate(part[0])
            }
            _, rewards, *_ = native.step(flat)
            result = subset.step(actions)
            for name, part in result.rewards.items():
                expected = [rewards[f"{name}_{i}"] for i in range(part.shape[1])]
                np.testing.assert_allclose(part[0], expected, 1e-6)
        assert result.truncated.tolist() == [True]
        assert result.terminated.tolist() == [False]
        assert all(part.all() for part in subset.active.values())


def test_actions_are_clipped_and_those_of_the_absent_are_ignored():
    env = PettingZooEnv(2, module=AGENTS, seed=1)
    env.reset()
    wild, tame = env.select(torch.arange(2)), env.select(torch.arange(2))
    actions = example_actions(env, 0)
    actions["wolf"] = torch.full((2, 1, 2), 5.0)
    step = wild.step(actions)
    actions["wolf"] = torch.ones(2, 1, 2)
    actions["hen"] = actions["hen"].masked_fill(~env.active["hen"], 2)
    assert_same(step, tame.step(actions))  # the env holds actions to their space


# Groups, forms of observation


def test_groups_may_be_named_and_ordered():
    groups = {"second": ["agent_2", "agent_0"], "first": ["agent_1"]}
    options: dict[str, Any] = {"module": "mpe2.simple_spread_v3", "seed": 1}
    env, plain = (
        PettingZooEnv(2, groups=groups, **options),
        PettingZooEnv(2, **options),
    )
    for instance in (env, plain):
        instance.reset()
    order = {"second": [2, 0], "first": [1]}
    for name, places in order.items():
        grouped = env.observe()[name].features
        assert grouped.equal(plain.observe()["agent"].features[:, places])
    moves = torch.tensor([[1, 2, 3], [4, 0, 1]])
    grouped = env.step({name: moves[:, places] for name, places in order.items()})
    reference = plain.step({"agent": moves})
    for name, places in order.items():
        assert grouped.rewards[name].equal(reference.rewards["agent"][:, places])


@pytest.mark.parametrize("dtype", [np.float32, np.uint8])
def test_observations_may_be_tokens_already(dtype):
    env = PettingZooEnv(
        2, module=f"{__name__}:Tokenized", options={"dtype": np.dtype(dtype).name}
    )
    spec = env.groups["agent"].tokens
    assert spec.type_names == ("self", "type_1", "type_2")
    assert spec.dtype == np.dtype(dtype).name
    env.reset()
    tokens = env.observe()["agent"]
    assert tokens.features.tolist() == [[[[1, 2], [3, 4], [0, 0]]]] * 2
    assert tokens.types.tolist() == [[[0, 2, 0]]] * 2
    assert tokens.padding.tolist() == [[[False, False, True]]] * 2
    assert str(tokens.features.dtype).endswith(spec.dtype)


def test_pettingzoo_registry_id_is_accepted():
    name = "marl_pool/simple_centroid-v0"
    env = PettingZooEnv(
        1, module=name, options={"num_noise": 2, "seed": 0}, max_steps=3
    )
    env.reset()
    assert env.groups["agent"].tokens.num_tokens == 6
    assert not env.observe()["agent"].padding.any()


# PettingZoo's own tests, for the adapter seen as a ParallelEnv again


def test_the_view_of_agents_that_come_and_go_is_told_of_births():
    from pettingzoo.test import parallel_api_test

    with warnings.catch_warnings():
        # PettingZoo forbids a second life; without births not all have even one.
        warnings.filterwarnings("ignore", message="No agents present but not all")
        options = {"birth": 0.0, "alone": 0.0}
        parallel_api_test(make_env("pettingzoo", module=AGENTS, options=options), 20)
    view = make_env("pettingzoo", module=AGENTS, seed=0, options={"death": 0.0})
    view.reset()
    before = set(view.agents)
    actions = {agent: view.action_space(agent).sample() for agent in view.agents}
    observations, rewards, terminations, *_ = view.step(actions)
    born = set(view.agents) - before
    assert born
    assert observations.keys() == rewards.keys() == terminations.keys()
    assert born <= observations.keys()
    assert not any(observations[agent]["padding"].any() for agent in born)


# Refusals


class Unsteady(ChangingAgents):
    calls = 0

    def reset(self, seed=None, options=None):
        Unsteady.calls += 1
        return super().reset(Unsteady.calls)


class Tokenized(ChangingAgents):
    def __init__(self, dtype="float32"):
        super().__init__()
        self.dtype, self.possible_agents = np.dtype(dtype), ["agent_0"]

    def observation_space(self, agent):
        return spaces.Dict(
            features=spaces.Box(0, 255, (3, 2), self.dtype),
            types=spaces.Box(0, 2, (3,), np.int64),
            padding=spaces.Box(0, 1, (3,), np.bool_),
        )

    def _observe(self, agents):
        return {
            agent: {
                "features": np.array([[1, 2], [3, 4], [0, 0]], self.dtype),
                "types": np.array([0, 2, 0]),
                "padding": np.array([False, False, True]),
            }
            for agent in agents
        }


class Odd(ChangingAgents):
    """An env with one unsupported space."""

    SPACES: ClassVar = {
        "video": spaces.Box(0, 1, (2, 4, 4, 3), np.float32),
        "dict": spaces.Dict(text=spaces.Text(3)),
        "sequence": spaces.Sequence(spaces.Box(0, 1, (4,), np.float32)),
        "wide": spaces.Box(-np.inf, np.inf, (2,), np.float32),
        "whole": spaces.Box(0, 3, (2,), np.int64),
    }

    def __init__(self, observation=None, action=None):
        super().__init__()
        self.observation, self.action = observation, action

    def observation_space(self, agent):
        return self.SPACES.get(self.observation) or super().observation_space(agent)

    def action_space(self, agent):
        return self.SPACES.get(self.action) or super().action_space(agent)


class Lonely(ChangingAgents):
    def __init__(self):
        super().__init__(wolves=0, hens=0)


def not_an_env():
    return object()


@yaml_cases("module, options, message")
def test_what_does_not_fit_is_refused_in_one_line(module, options, message):
    with pytest.raises(InputError, match=message) as caught:
        PettingZooEnv(1, module=module, **options)
    assert "\n" not in str(caught.value)


def test_a_module_that_fails_at_import_is_refused(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "broken_env.py").write_text("raise OSError('no\\ndisplay')")
    with pytest.raises(InputError, match="cannot be imported: OSError: no display"):
        PettingZooEnv(1, module="broken_env")
    for name in [name for name in sys.modules if name.startswith("mpe2")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pygame", None)
    with pytest.raises(InputError, match=r"env\.module: 'mpe2.* cannot be .*pygame"):
        PettingZooEnv(1, module=TAG)


# Pictures


def test_frames_show_the_current_state_of_each_selection():
    env = PettingZooEnv(2, module=AGENTS, options={"death": 0.0, "horizon": 9})
    env.reset()
    early = env.select(torch.tensor([0]))
    run(env, 4)
    for moment, width in ((early, 0), (env, 16), (early, 0)):
        image = moment.frame(0, size=40)
        assert image.shape == (40, 40, 3)
        assert image.dtype == np.uint8
        # Twice as wide as high: half of the square is margin.
        middle = image[20, :, 0]
        assert (middle == 200).sum() == width // 2
        assert (image[0] == image[0, 0]).all()
    env.reset()
    assert not (env.frame(0, size=40)[20] == 200).any()


def test_a_frame_of_mpe2_shows_its_agents():
    env = PettingZooEnv(1, module=TAG, seed=1)
    env.reset()
    image = env.frame(size=128)
    assert image.shape == (128, 128, 3)
    # 0.85, 0.35, 0.35 of 200: the adversaries.
    assert (np.abs(image.astype(int) - [170, 70, 70]).sum(-1) < 12).sum() > 20
    run(env, 3)
    assert not np.array_equal(env.frame(size=128), image)


class Blind(ChangingAgents):
    def __init__(self, **options):
        options.pop("render_mode", None)
        super().__init__(**options)

    def render(self):
        return None


def blind(wolves=1):
    return ChangingAgents(wolves=wolves)


@pytest.mark.parametrize(
    ("name", "message"),
    [("Blind", "array of numbers, got None"), ("blind", "rejects .*render_mode")],
)
def test_an_env_that_cannot_be_drawn_says_so(name, message):
    env = PettingZooEnv(1, module=f"{__name__}:{name}")
    with pytest.raises(InputError, match="once it has been reset"):
        env.frame()
    env.reset()
    with pytest.raises(InputError, match=message):
        env.frame()


# Golden trajectory


def golden() -> list[dict[str, Any]]:
    """Two environments of mpe2's tag, five steps, rounded."""
    env = PettingZooEnv(2, module=TAG, seed=8, dtype=torch.float64)
    env.reset()
    return [
        {
            name: {
                "rewards": result.rewards[name].round(decimals=6).tolist(),
                "features": observations[name].features.round(decimals=6).tolist(),
            }
            for name in env.groups
        }
        for result, observations, _ in run(env, 5)
    ]


def test_golden_trajectory():
    for row, saved in zip(golden(), json.loads(GOLDEN.read_text()), strict=True):
        for name, parts in saved.items():
            for key, values in parts.items():
                np.testing.assert_allclose(row[name][key], values, atol=2e-6)


class Closable(ChangingAgents):
    """Agents that can be drawn and closed, and count those that are open."""

    num_open = 0

    def __init__(self, **options):
        super().__init__(**options)
        Closable.num_open += 1

    def render(self):
        return np.zeros((4, 4, 3), np.uint8)

    def close(self):
        Closable.num_open -= 1
        raise RuntimeError("closed noisily")


def test_every_environment_is_closed_with_the_last_batch_that_uses_it(monkeypatch):
    monkeypatch.delitem(sys.modules, "pygame", raising=False)
    env = PettingZooEnv(2, module=f"{__name__}:Closable")
    env.reset()
    env.draw(0, 4, None, "wolf", 0)
    assert Closable.num_open == 3
    selected = env.select(torch.arange(1))
    del env
    gc.collect()
    assert Closable.num_open > 0
    del selected
    gc.collect()
    assert Closable.num_open == 0


def test_a_batch_that_is_gone_leaves_the_pictures_of_others_alone():
    first, second = (PettingZooEnv(1, module="mpe2.simple_crypto_v3") for _ in range(2))
    for env in (first, second):
        env.reset()
        env.draw(0, 64, None, next(iter(env.groups)), 0)
    del second, env
    gc.collect()
    assert first.draw(0, 64, None, next(iter(first.groups)), 0).any()


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(golden()) + "\n")


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("mpe2.simple_spred_v3", r"Did you mean 'mpe2.simple_spread_v3'\?$"),
        ("mpe2.zzz", "No module named 'mpe2.zzz'$"),
        ("os.pth", "'os' is not a package$"),
    ],
)
def test_misspelt_module_of_an_installed_package(module, message):
    with pytest.raises(InputError, match=message):
        find_factory(module)


def test_the_limit_of_an_episode_is_part_of_its_state():
    module = {"module": "mpe2.simple_spread_v3", "options": {"max_cycles": 2}}
    env = PettingZooEnv(3, seed=0, **module)
    assert not env.at_limit().any()
    env.reset()
    size = (3, env.groups["agent"].num_agents)
    for _ in range(2):
        assert not env.at_limit().any()
        env.step({"agent": torch.zeros(size, dtype=torch.int64)})
    assert env.at_limit().all()
    env.reset(torch.tensor([False, True, False]))
    assert env.at_limit().tolist() == [True, False, True]
    assert env.select(torch.tensor([1, 0])).at_limit().tolist() == [False, True]
    loaded = PettingZooEnv(3, seed=0, **module)
    loaded.load_state_dict(env.state_dict())
    assert loaded.at_limit().tolist() == [True, False, True]


def test_a_state_of_an_earlier_revision_is_loaded():
    module = {"module": "mpe2.simple_spread_v3", "options": {"max_cycles": 9}}
    env, loaded = (PettingZooEnv(2, seed=0, **module) for _ in range(2))
    env.reset()
    state = env.state_dict()
    del state["tensors"]["truncated"]
    loaded.load_state_dict(state)
    assert not loaded.at_limit().any()
    pairs = zip(
        env.observe()["agent"].parts, loaded.observe()["agent"].parts, strict=True
    )
    assert all(torch.equal(*pair) for pair in pairs)
