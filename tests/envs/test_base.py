"""The base class: its example runs, and descriptions replace built environments."""

import inspect
import math
import textwrap

import pytest
import torch
from gymnasium import spaces

import marl_pool.envs.description as description
from helpers.farm import FoxAndHens
from marl_pool.envs import ENVS, base, make_batched_env
from marl_pool.envs.base import AgentGroup, BatchedEnv
from marl_pool.envs.description import describe_env
from marl_pool.options.names import UntrustedError, trust
from marl_pool.policies.random_policy import RandomPolicy
from marl_pool.tokens import Tokens, TokenSpec
from marl_pool.utils.errors import InputError

PLUGIN = "helpers.farm:FoxAndHens"


def docstring_example() -> type[BatchedEnv]:
    text = inspect.getdoc(BatchedEnv) or ""
    block = text.partition("::\n\n")[2].partition("\n``env=")[0]
    names = {
        "BatchedEnv": BatchedEnv,
        "AgentGroup": AgentGroup,
        "TokenSpec": TokenSpec,
        "Tokens": Tokens,
        "spaces": spaces,
        "torch": torch,
    }
    exec(textwrap.dedent(block), names)
    cls: type[BatchedEnv] = names["Line"]  # type: ignore[assignment]
    return cls


def play(env: BatchedEnv, steps: int) -> torch.Tensor:
    """Return observations ``(steps, num_envs)`` while every agent moves right."""
    features = []
    for _ in range(steps):
        features.append(env.observe()["agent"].features[:, 0, 0, 0])
        env.step({"agent": torch.ones(env.num_envs, 1, 1)})
    return torch.stack(features)


def test_the_example_of_the_docstring_is_an_environment():
    line = docstring_example()
    env = line(5, seed=3, max_steps=2)
    env.reset()
    start = env.observe()["agent"]
    group = env.groups["agent"]
    assert start.features.shape == (5, 1, 1, 1)
    assert group.tokens.space().contains(
        {k: v[0, 0].numpy() for k, v in start.columns.items()}
    )
    first = start.features.flatten()
    assert len(first.unique()) == 5
    assert (first.abs() < 1).all()

    # An action of +1 moves by 0.1, the reward is the new distance, two steps truncate.
    step = env.step({"agent": torch.ones(5, 1, 1)})
    moved = env.observe()["agent"].features.flatten()
    torch.testing.assert_close(moved, first + 0.1)
    torch.testing.assert_close(step.rewards["agent"][:, 0], -moved.abs())
    assert not step.truncated.any()
    assert env.step({"agent": torch.ones(5, 1, 1)}).truncated.all()


def test_the_example_keeps_the_rules_of_random_streams_and_states():
    line = docstring_example()
    batch, alone = line(5, seed=3), line(1, seed=3, first_env=4)
    for env in (batch, alone):
        env.reset()
    # Environment 4 plays the same episode alone and in the batch.
    assert torch.equal(play(batch, 3)[:, 4:], play(alone, 3))

    # A saved state and a selection both continue exactly.
    again = line(5, seed=3)
    again.load_state_dict(batch.state_dict())
    part = batch.select(torch.tensor([2, 0]))
    expected = play(batch, 3)
    assert torch.equal(play(again, 3), expected)
    assert torch.equal(play(part, 3), expected[:, [2, 0]])


@pytest.mark.parametrize("name", ["simple_tag", "boxworld", PLUGIN])
def test_a_description_is_that_of_the_environment(name):
    env = make_batched_env(name, 2, max_steps=7)
    summary = describe_env({"name": name, "max_steps": 7})
    assert summary.groups == env.groups
    assert summary.max_steps == 7
    assert (summary.simulated, summary.patch_grid) == (env.simulated, env.patch_grid)


def test_each_set_of_options_is_built_once(monkeypatch):
    monkeypatch.setattr(description, "_descriptions", {})
    built = []
    constructor = FoxAndHens.__init__

    def counting(self: FoxAndHens, *args: object, **options: object) -> None:
        built.append(options)
        constructor(self, *args, **options)

    monkeypatch.setattr(FoxAndHens, "__init__", counting)
    for max_steps in (5, 6, 5):
        env = {"name": PLUGIN, "max_steps": max_steps}
        assert describe_env(env).max_steps == max_steps
        assert describe_env(dict(reversed(env.items()))).max_steps == max_steps
    assert [options["max_steps"] for options in built] == [5, 6]

    # A dtype has no JSON form: described, but not kept.
    exotic = {"name": PLUGIN, "dtype": torch.float64}
    assert describe_env(exotic) == describe_env(exotic)
    assert len(built) == 4


def test_a_description_that_is_kept_passes_no_trust_check():
    pytest.importorskip("mpe2")
    env = {"name": PLUGIN}
    module = {"name": "pettingzoo", "module": "mpe2.simple_spread_v3"}
    described = [describe_env(env), describe_env(module)]
    with trust(["mpe2.simple_spread_v3"], "a file"):
        with pytest.raises(UntrustedError, match=PLUGIN):
            describe_env(env)
        assert describe_env(module) == described[1]
    with trust([PLUGIN], "a file"):
        assert describe_env(env) == described[0]
        with pytest.raises(UntrustedError, match=r"mpe2\.simple_spread_v3"):
            describe_env(module)


def test_wrong_options_are_refused_each_time():
    for _ in range(2):
        with pytest.raises(InputError, match=r"env\.max_steps: .*got 0"):
            describe_env({"name": "cartpole", "max_steps": 0})


MIXED = spaces.Tuple((spaces.Discrete(3), spaces.Box(-1, 1, (1,))))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "foo"}, "device: expected cpu, cuda or cuda:N, got 'foo'"),
        ({"device": "mps"}, "device: expected cpu, cuda or cuda:N, got 'mps'"),
        ({"dtype": torch.int64}, "dtype: expected float32 or float64, got .*int64"),
        ({"dtype": torch.float16}, "dtype: expected float32 or float64, got .*float16"),
    ],
)
def test_devices_and_dtypes_that_do_not_fit_are_refused(options, message):
    with pytest.raises(InputError, match=f"{message}$"):
        make_batched_env("simple_centroid", 2, **options)


@pytest.mark.parametrize(
    "where",
    [torch.tensor([True]), torch.tensor([1, 0]), torch.tensor(True), [True, False]],
)
def test_a_reset_takes_a_mask_of_all_environments(where):
    env = make_batched_env("simple_centroid", 2)
    env.reset()
    with pytest.raises(InputError, match=r"^reset: expected a tensor of bool .*\(2,\)"):
        env.reset(where)
    assert env.episodes.tolist() == [0, 0]


@pytest.mark.parametrize("indices", [torch.tensor([True, False]), torch.ones(2)])
def test_environments_are_selected_by_indices(indices):
    env = make_batched_env("simple_centroid", 2)
    with pytest.raises(InputError, match="^select: expected indices of dtype int64 or"):
        env.select(indices)
    assert env.select([1, 1]).env_ids.tolist() == [1, 1]  # type: ignore[arg-type]


PUSHES = torch.zeros(2, 1, 5)


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        ([PUSHES], "expected a mapping from agent to tensors, got list"),
        (PUSHES.numpy(), "expected a mapping from agent to tensors, got ndarray"),
        ({"agent": PUSHES.numpy()}, "expected a tensor, got ndarray"),
        ({"agent": PUSHES.tolist()}, "expected a tensor, got list"),
        ({"agent": PUSHES.bool()}, "expected real numbers, got torch.bool"),
        ({"agent": PUSHES.cfloat()}, "expected real numbers, got torch.complex64"),
    ],
)
def test_actions_of_another_form_are_refused(actions, message):
    env = make_batched_env("simple_centroid", 2)
    env.reset()
    with pytest.raises(InputError, match=f"^actions.*: {message}$"):
        env.step(actions)
    assert env.steps.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"index": 2}, "frame: index: expected 0 to 1, got 2"),
        ({"index": -1}, "frame: index: expected 0 to 1, got -1"),
        ({"agent": 1}, "frame: agent: expected 0 to 0, got 1"),
        ({"group": "agnet"}, "unknown group 'agnet': choose from agent"),
        ({"size": 0}, "frame: size: .* got 0"),
    ],
)
def test_a_frame_of_what_does_not_exist_is_refused(options, message):
    env = make_batched_env("simple_centroid", 2)
    env.reset()
    with pytest.raises(InputError, match=message):
        env.frame(**options)


@pytest.mark.parametrize(
    ("space", "action", "message"),
    [
        (spaces.Discrete(3), 2, ""),
        (spaces.Discrete(3), 7, "from 0 to 2, got 7"),
        (spaces.Discrete(3), -3, "from 0 to 2, got -3"),
        (spaces.MultiDiscrete([2, 3]), [1, 2], ""),
        (spaces.MultiDiscrete([2, 3]), [2, 0], "from 0 to 1, got 2"),
        (spaces.MultiDiscrete([2, 3]), [0, -1], "from 0 to 2, got -1"),
        (MIXED, [2.0, 0.3], ""),
        (MIXED, [3.0, 0.3], "from 0 to 2, got 3.0"),
        (MIXED, [1.5, 0.3], "integers, got 1.5"),
        (MIXED, [math.nan, 0.3], "integers, got nan"),
    ],
)
def test_choices_that_are_no_options_never_reach_an_environment(space, action, message):
    env = docstring_example()(2)
    env.groups = {"agent": AgentGroup(1, TokenSpec(1, 1, ("self",)), space)}
    env.advance = lambda actions: ({"agent": torch.ones(2, 1)}, torch.zeros(2).bool())
    env.reset()
    right = torch.zeros_like(torch.tensor([[action]]))
    actions = {"agent": torch.cat([right, torch.tensor([[action]])])}
    if message:
        with pytest.raises(InputError, match=f"^actions of 'agent': .*{message}$"):
            env.step(actions)
    else:
        env.step(actions)
    assert env.steps.tolist() == ([0, 0] if message else [1, 1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("1", TokenSpec(1, 1, ("self",))), "num_agents: expected an integer, got str"),
        ((1, spaces.Box(-1, 1, (1,))), "tokens: expected a TokenSpec, got Box"),
        ((1, None), "tokens: expected a TokenSpec, got NoneType"),
    ],
)
def test_a_group_of_other_parts_is_refused(arguments, message):
    with pytest.raises(InputError, match=f"^AgentGroup.{message}"):
        AgentGroup(*arguments, spaces.Discrete(2))


def test_a_group_has_a_space_of_actions():
    message = "^AgentGroup.action_space: expected a space of Gymnasium, got int"
    with pytest.raises(InputError, match=message):
        AgentGroup(1, TokenSpec(1, 1, ("self",)), 2)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", sorted({*ENVS} - {"pettingzoo"}))
def test_a_caller_may_write_into_the_results_of_a_step(name: str) -> None:
    env = make_batched_env(name, 2, seed=0)
    env.reset()
    actions = {
        name: RandomPolicy(env.groups[name].action_space).act(part).action
        for name, part in env.observe().items()
    }
    step = env.step(actions)
    state, expected = env.state_dict(), step.terminated.clone()
    step.terminated.fill_(True)
    for action in actions.values():
        action.add_(1)
    for key, part in env.state_dict()["tensors"].items():
        assert torch.equal(part, state["tensors"][key]), key
    assert torch.equal(env.step({k: a * 0 for k, a in actions.items()})[1], expected)


def test_uniform_numbers_are_below_1_in_float32(monkeypatch) -> None:
    env = docstring_example()(2, seed=0)
    largest = torch.full((2, 3), 1 - 2.0**-30, dtype=torch.float64)
    monkeypatch.setattr(base, "uniform", lambda *_: largest)
    assert (env.sample_uniform(env.env_ids, 3) < 1).all()
