"""Turn-based (AEC) environments: only the agent in turn acts and is paid for it."""

import importlib
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pettingzoo.utils.conversions import aec_to_parallel

pytest.importorskip("ray")

from helpers.ppo import assert_same, resumed, run_of
from helpers.tables import yaml_cases
from helpers.turn_based import PassItOn, RandomTurns
from marl_pool import make_policy
from marl_pool.cli.main import main
from marl_pool.config import compose
from marl_pool.envs.pettingzoo.env import PettingZooEnv
from marl_pool.envs.pettingzoo.turn_based import CycledAgents
from marl_pool.policies.random_policy import RandomPolicy
from marl_pool.rollout import Rollout
from marl_pool.tokens import Tokens
from marl_pool.training.ppo.trajectories import (
    estimate_advantages,
    own_turns,
    trajectory_rows,
)
from marl_pool.trajectory import Trajectory
from marl_pool.utils.errors import InputError

MODULE = "helpers.turn_based:RandomTurns"
# The module of an environment warns that it will be found in a registry instead.
OLD_API = pytest.mark.filterwarnings("ignore:The old environment creation")
GAMES = ["pettingzoo.classic.tictactoe_v3", "pettingzoo.classic.connect_four_v3"]


@pytest.fixture(autouse=True)
def _empty_log():
    RandomTurns.log.clear()


def turn_env(num_envs=1, *, max_steps=1000, seed=1, **options):
    return PettingZooEnv(
        num_envs, module=MODULE, options=options, max_steps=max_steps, seed=seed
    )


def random_policies(env):
    return {
        name: RandomPolicy(group.action_space) for name, group in env.groups.items()
    }


# Credit: plain GAE over each agent's own turns


def random_fragment(seed, steps, num_envs, agents):
    """Make a fragment in which agents take turns, die, and episodes end, at random."""
    random = np.random.default_rng(seed)
    shape = (steps, num_envs, agents)
    active, alive = np.zeros((2, *shape), bool)
    next_active = np.zeros(shape, bool)
    terminated, truncated = np.zeros((2, steps, num_envs), bool)
    values, final_values, rewards = random.normal(size=(3, *shape))
    next_values = np.concatenate([values[1:], final_values[-1:]])
    for env in range(num_envs):
        living = [*range(agents)]
        agent = random.choice(living)
        for t in range(steps):
            active[t, env, agent] = True
            if random.random() < 0.3 and len(living) > 1:
                living.remove(random.choice(living))
            alive[t, env, living] = True
            end = random.choice(
                ["", "terminated", "time limit", "all"], p=[0.7, *[0.1] * 3]
            )
            agent = random.choice(living)
            next_active[t, env, agent] = True
            if end == "terminated":
                terminated[t, env] = True
                alive[t, env] = next_active[t, env] = False
            elif end:
                truncated[t, env] = True
                next_values[t, env] = final_values[t, env]
                # Where all were truncated, all have a final observation.
                if end == "all":
                    next_active[t, env, living] = True
            if end:
                living = [*range(agents)]
                agent = random.choice(living)
    tokens = Tokens(
        torch.from_numpy(values)[..., None, None],
        torch.zeros(*shape, 1, dtype=torch.int64),
        torch.zeros(*shape, 1, dtype=torch.bool),
    )
    parts = {
        "actions": values,
        "log_probs": values,
        "logits": values[..., None],
        "values": values,
        "next_values": next_values,
        "rewards": rewards,
        "terminated": terminated,
        "truncated": truncated,
        "active": active,
        "next_active": next_active,
        "next_alive": alive,
    }
    tensors = {name: torch.from_numpy(part) for name, part in parts.items()}
    return Trajectory(tokens, **tensors)


def plain_advantages(part, gamma, lam):
    """Return advantages by value of the turn: gather turns, then run plain GAE."""
    numpy = {
        name: p.numpy() for name, p in part._asdict().items() if torch.is_tensor(p)
    }
    steps, num_envs, agents = numpy["rewards"].shape
    advantages = {}
    for env, agent in itertools.product(range(num_envs), range(agents)):
        at = {
            name: array[:, env] if array.ndim == 2 else array[:, env, agent]
            for name, array in numpy.items()
            if name != "logits"
        }
        turns, sequences = [], []
        for t in range(steps):
            if at["active"][t]:
                if turns:
                    turns[-1]["next"] = at["values"][t]
                value = at["values"][t]
                turns.append({"value": value, "reward": 0.0, "next": None})
            if turns:
                turns[-1]["reward"] += at["rewards"][t]
            ends = at["terminated"][t] or at["truncated"][t] or t == steps - 1
            if turns and (at["terminated"][t] or not at["next_alive"][t]):
                turns[-1]["next"], ends = 0.0, True
            elif turns and ends and at["next_active"][t]:
                turns[-1]["next"] = at["next_values"][t]
            if ends:
                sequences.append([t for t in turns if t["next"] is not None])
                turns = []
        for sequence in sequences:
            following = 0.0
            for turn in reversed(sequence):
                error = turn["reward"] + gamma * turn["next"] - turn["value"]
                following = error + gamma * lam * following
                advantages[turn["value"]] = following
    return advantages


@given(
    seed=st.integers(0, 2**32 - 1),
    steps=st.integers(1, 25),
    num_envs=st.integers(1, 3),
    agents=st.integers(1, 4),
    gamma=st.sampled_from([0.0, 0.9, 1.0]),
    lam=st.sampled_from([0.0, 0.8, 1.0]),
)
def test_advantages_are_those_of_plain_gae_over_own_turns(
    seed, steps, num_envs, agents, gamma, lam
):
    part = random_fragment(seed, steps, num_envs, agents)
    turns = own_turns(part)
    advantages, targets = estimate_advantages(turns, gamma, lam)
    rows = trajectory_rows(turns, advantages, targets)
    expected = plain_advantages(part, gamma, lam)
    gae = dict(zip(rows["actions"].tolist(), rows["advantages"].tolist(), strict=True))
    assert gae.keys() == expected.keys()
    for value, advantage in expected.items():
        assert gae[value] == pytest.approx(advantage, rel=1e-5, abs=1e-5)
    # Observations go with their turns.
    assert torch.equal(rows["obs"]["features"][..., 0, 0], rows["actions"])


def test_a_fragment_in_which_all_act_stays_as_it_is():
    env = PettingZooEnv(2, module="mpe2.simple_spread_v3", max_steps=4)
    part = Rollout(env, random_policies(env), explore=True).steps(6)["agent"]
    assert own_turns(part) is part


# Episodes


@pytest.mark.parametrize("max_steps", [5, 1000])
@pytest.mark.parametrize("masks", ["observation", "infos", None])
def test_returns_count_every_reward_and_actions_are_those_of_the_agent_in_turn(
    masks, max_steps
):
    for seed in range(4):
        RandomTurns.log.clear()
        env = turn_env(masks=masks, max_steps=max_steps, seed=seed)
        actors, steps = [], []

        def record(transition, actors=actors, steps=steps):
            steps.append(transition.decisions["p"].action[0].tolist())

        rollout = Rollout(env, random_policies(env), explore=True)
        actors.append(rollout.env.active["p"][0].tolist())
        episodes = rollout.episodes(record)
        turns = RandomTurns.log[1:]
        assert int(episodes.lengths) == len(turns) == len(steps)
        totals = dict.fromkeys(RandomTurns.possible_agents, 0.0)
        for (agent, action, rewards), actions in zip(turns, steps, strict=True):
            assert actions[RandomTurns.possible_agents.index(agent)] == action
            for name, reward in rewards.items():
                totals[name] += reward
        expected = torch.tensor([*totals.values()], dtype=torch.float64)
        torch.testing.assert_close(
            episodes.returns["p"][0], expected, rtol=1e-5, atol=1e-5
        )


def test_one_agent_observes_and_acts_and_the_others_wait():
    env = turn_env(4, deaths=0.3)
    env.reset()
    dead = 0
    for _ in range(40):
        active, alive = env.active["p"], env.alive["p"]
        tokens = env.observe()["p"]
        assert (active.sum(1) == 1).all()
        assert (alive | ~active).all()
        assert tokens.padding[~active].all()
        assert not tokens.padding[active].any()
        options = tokens.action_mask.byte().argmax(-1)
        step = env.step({"p": options})
        assert (step.rewards["p"][~alive] == 0).all()
        dead += int((~alive).sum())
        over = step.terminated | step.truncated
        # All that were truncated at the end have an observation to bootstrap from.
        assert (env.active["p"] == env.alive["p"])[over].all()
        env.reset(over)
    assert dead


def test_memories_wait_for_their_agents_turns():
    env = turn_env(2, deaths=0.0)
    group = env.groups["p"]
    pooling = {"name": "attention_neuron", "num_codes": 4, "memory": "lstm"}
    policy = make_policy(group.tokens, group.action_space, pooling=pooling)
    part = Rollout(env, {"p": policy}, explore=True).steps(10)["p"]
    rows = torch.utils._pytree.tree_leaves(part.states)
    assert rows
    for states in rows:
        waits = ~part.active[:-1] & ~(part.terminated | part.truncated)[:-1, :, None]
        assert torch.equal(states[1:][waits], states[:-1][waits])


def test_an_environment_of_cycles_is_played_in_cycles():
    env = PettingZooEnv(1, module="pettingzoo.classic.rps.rps:raw_env")
    assert not env.turn_based
    assert turn_env().turn_based


@yaml_cases("fault, message")
def test_a_broken_rule_is_told_with_step_and_agent(fault, message):
    env = turn_env(fault=fault, deaths=0.0)
    with pytest.raises(InputError, match=message):
        Rollout(env, random_policies(env), explore=True).steps(8)


class Spoiled(PassItOn):
    """An env that sets an attribute at the end of a turn; turn 0 is the reset."""

    MISSING = "missing"

    def __init__(self, attribute=None, value=None, turn=1, cycles=False):
        super().__init__()
        self.metadata = {"name": "spoiled", "is_parallelizable": cycles}
        self.attribute, self.value, self.spoiled = attribute, value, turn

    def reset(self, seed=None, options=None):
        super().reset(seed, options)
        self._spoil()

    def step(self, action):
        if self.turn == 0:
            self.rewards = dict.fromkeys(PassItOn.possible_agents, 0.0)
        super().step(action)
        self._spoil()

    def _spoil(self):
        if self.attribute is None or self.turn != self.spoiled:
            return
        if self.value == self.MISSING:
            delattr(self, self.attribute)
        else:
            setattr(self, self.attribute, self.value)


@yaml_cases("kind, attribute, value, turn, message")
def test_attributes_that_are_not_those_of_the_api_are_told(
    kind, attribute, value, turn, message
):
    for cycles in {"turns": [False], "cycles": [True], "both": [False, True]}[kind]:
        options = {"attribute": attribute, "value": value, "turn": turn}
        options["cycles"] = cycles
        env = PettingZooEnv(1, module=f"{__name__}:Spoiled", options=options)
        assert env.turn_based != cycles
        with pytest.raises(InputError, match=f"^env.module: {message}"):
            Rollout(env, random_policies(env), explore=True).steps(4)


@pytest.mark.parametrize("cycles", [False, True])
@pytest.mark.parametrize("value", [Spoiled.MISSING, None, {}])
def test_rewards_count_from_the_first_step_on(cycles, value):
    options = {"attribute": "rewards", "value": value, "turn": 0, "cycles": cycles}
    plain = PettingZooEnv(2, module=f"{__name__}:Spoiled", options={"cycles": cycles})
    odd = PettingZooEnv(2, module=f"{__name__}:Spoiled", options=options)
    parts = [
        Rollout(env, random_policies(env), explore=True).steps(6)["leader"].rewards
        for env in (plain, odd)
    ]
    assert torch.equal(*parts)


@pytest.mark.parametrize("metadata", [None, ["name"], AttributeError("metadata")])
def test_an_environment_without_metadata_is_played_in_turns(monkeypatch, metadata):
    def read(env):
        if isinstance(metadata, Exception):
            raise metadata
        return metadata

    monkeypatch.setattr(PassItOn, "metadata", property(read))
    env = PettingZooEnv(1, module="helpers.turn_based:PassItOn")
    assert env.turn_based
    Rollout(env, random_policies(env), explore=True).steps(4)


@pytest.mark.parametrize("module", ["mpe2.simple_tag_v3", "pettingzoo.classic.rps_v2"])
@OLD_API
def test_cycles_are_those_of_pettingzoo(module):
    build = importlib.import_module(module).env
    theirs, ours = aec_to_parallel(build()), CycledAgents(build())
    for seed in range(2):
        observations = theirs.reset(seed=seed)[0], ours.reset(seed=seed)[0]
        number = 0
        while theirs.agents:
            number += 1
            for agent in theirs.agents:
                assert np.array_equal(*(seen[agent] for seen in observations))
            spaces_of = {a: theirs.action_space(a) for a in theirs.agents}
            actions = {
                a: (number + i) % s.n for i, (a, s) in enumerate(spaces_of.items())
            }
            steps = theirs.step(actions), ours.step(actions)
            assert steps[0][1:4] == steps[1][1:4]
            assert theirs.agents == ours.agents
            observations = steps[0][0], steps[1][0]


def test_an_id_of_the_registry_and_a_module_name_the_same_game():
    for module in (
        "classic/tictactoe_v3",
        "pettingzoo.classic.tictactoe.tictactoe:env",
    ):
        env = PettingZooEnv(1, module=module)
        assert env.turn_based
        assert [*env.groups] == ["player"]


# Commands


def training(module, *overrides, **env):
    options = [f"env.{key}={value}" for key, value in env.items()]
    return compose(
        "train",
        [
            *("env=pettingzoo", f"env.module={module}", *options, "threads=1"),
            *("ppo.num_envs=4", "ppo.batch_size=64", "ppo.minibatch_size=32"),
            *("ppo.num_epochs=2", "checkpoint.every=1", *overrides),
        ],
    )


@pytest.mark.parametrize(
    ("pooling", "masks"), [("ada", "observation"), ("attention_neuron", "infos")]
)
def test_training_resumes_exactly(tmp_path, pooling, masks):
    options = {"options": f"{{masks: {masks}}}"}
    config = training(MODULE, f"pooling={pooling}", "total_steps=128", **options)
    whole = run_of(tmp_path / "whole", config)
    run_of(tmp_path / "part", {**config, "total_steps": 64})
    assert_same(resumed(tmp_path / "part", 128), whole)
    assert len(list(whole.rows())) == 2


@OLD_API
@pytest.mark.parametrize("module", [MODULE, GAMES[0]])
def test_a_check_holds_the_rules(module, capsys):
    assert main(["check-env", "env=pettingzoo", f"env.module={module}"]) == 0
    assert "failed" not in capsys.readouterr().out


@pytest.mark.slow
@OLD_API
def test_a_run_is_trained_evaluated_and_drawn(tmp_path):
    pytest.importorskip("imageio")
    run, plugin = tmp_path / "run", ["--plugin", GAMES[1]]
    run_of(run, training(GAMES[1], "total_steps=128"))
    quick = ["suite=quick", "episodes=8"]
    assert main(["evaluate", str(run), *quick, *plugin]) == 0
    assert main(["render", str(run), *plugin]) == 0


@pytest.mark.slow
def test_ppo_pays_the_turn_that_earned(tmp_path):
    sizes = ["ppo.num_envs=16", "ppo.batch_size=512", "ppo.minibatch_size=128"]
    words = [*sizes, "ppo.lr=0.01", "total_steps=6144"]
    module = "helpers.turn_based:PassItOn"
    run = run_of(tmp_path / "run", training(module, *words))
    *_, last = run.rows()
    returns = [last[f"{name}/return_mean"] for name in PassItOn.possible_agents]
    # Chance gives a third of it.
    assert min(returns) > 0.9 * PassItOn.ROUNDS


@pytest.mark.parametrize("turn_based", [False, True])
def test_living_agents_are_recorded_where_not_all_act(turn_based, monkeypatch):
    checks = []
    monkeypatch.setattr(
        "marl_pool.envs.contract.validate_step", lambda *_: checks.append("again")
    )
    changing = {"module": "helpers.changing_agents:ChangingAgents", "max_steps": 9}
    env = turn_env(2) if turn_based else PettingZooEnv(2, **changing)
    parts = Rollout(env, random_policies(env), explore=True).steps(3)
    assert {part.alive is not None for part in parts.values()} == {turn_based}
    assert not checks  # `BatchedEnv.step` has validated the step
