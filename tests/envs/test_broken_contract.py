"""A user's environment that breaks its contract is refused wherever it is played."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

import marl_pool
from marl_pool.cli import main as cli
from marl_pool.envs import make_env
from marl_pool.envs.base import AgentGroup, BatchedEnv
from marl_pool.envs.checks import check_env
from marl_pool.envs.timeout import EnvExitError
from marl_pool.envs.vector_view import OneAgentVectorView
from marl_pool.policies.random_policy import RandomPolicy
from marl_pool.rollout import Rollout
from marl_pool.tokens import Tokens, TokenSpec
from marl_pool.utils.errors import InputError, described

Change = Callable[[Any], Any]
"""A map from the correct result of a method to a faulty one."""


class Yard(BatchedEnv):
    """Hens, the last of which is gone from the second step on, and a fox.

    Args:
        after: steps of an episode before the fault.
        alone: a single hen, and no fox.
    """

    state_names = ("x",)
    faults: ClassVar[dict[str, Change]] = {}
    """Changes of what methods and properties return, by name."""

    def __init__(
        self,
        num_envs: int,
        *,
        after: int = 0,
        alone: bool = False,
        max_steps: int = 6,
        **common: Any,
    ) -> None:
        super().__init__(num_envs, max_steps=max_steps, **common)
        spec, space = TokenSpec(2, 3, ("self", "grain")), spaces.Discrete(2)
        counts = {"hen": 1} if alone else {"hen": 2, "fox": 1}
        self.groups = {name: AgentGroup(n, spec, space) for name, n in counts.items()}
        self.after, self.alone = after, alone
        self.x = torch.zeros(num_envs)

    def faulty(self, name: str, right: Any) -> Any:
        is_due = name in self.faults and int(self.steps.max()) >= self.after
        return self.faults[name](right) if is_due else right

    @property
    def alive(self) -> Any:
        return self.faulty("alive", self.living())

    @property
    def active(self) -> Any:
        return self.faulty("active", self.living())

    def living(self) -> dict[str, torch.Tensor]:
        shape = {name: (self.num_envs, g.num_agents) for name, g in self.groups.items()}
        living = {name: torch.ones(size).bool() for name, size in shape.items()}
        if not self.alone:
            living["hen"][:, 1] = self.steps < 1
        return living

    def observe(self) -> Any:
        tokens = {}
        for name, group in self.groups.items():
            features = self.x[:, None, None, None].expand(-1, group.num_agents, 2, 3)
            types = torch.tensor([0, 1]).expand(features.shape[:3])
            tokens[name] = Tokens(features.clone(), types, types > 1)
        return self.faulty("observe", tokens)

    def place(self, rows: torch.Tensor, keys: torch.Tensor) -> None:
        self.x = self.x.index_copy(0, rows, self.sample_uniform(keys, 1)[:, 0])

    def advance(self, actions: Any) -> Any:
        rewards = {name: alive.float() for name, alive in self.living().items()}
        ends = torch.zeros(self.num_envs, dtype=torch.bool)
        return self.faulty("advance", (rewards, ends))


def rewards(change: Change) -> Change:
    """Change the rewards of a step."""
    return lambda results: (change(results[0]), results[1])


def ends(change: Change) -> Change:
    """Change the ends of a step."""
    return lambda results: (results[0], change(results[1]))


def hens(change: Change) -> Change:
    """Change the part of the first group of agents."""
    return lambda by_group: {**by_group, "hen": change(by_group["hen"])}


def shown(**changes: Change) -> dict[str, Change]:
    """Change parts of what the hens observe."""

    def change(tokens: Tokens) -> Tokens:
        parts = {name: c(getattr(tokens, name)) for name, c in changes.items()}
        return tokens._replace(**parts)

    return {"observe": hens(change)}


def constant(value: Any) -> Change:
    return lambda _: value


FORMS: dict[str, tuple[dict[str, Change], str]] = {
    "advance None": ({"advance": constant(None)}, "advance: expected a tuple of rew"),
    "advance of 3": ({"advance": lambda r: (*r, 0)}, "terminated, got 3 of them"),
    "rewards None": (
        {"advance": rewards(constant(None))},
        "rewards: expected a dict by group, got None",
    ),
    "no rewards": (
        {"advance": rewards(constant({}))},
        "rewards: expected the groups hen",
    ),
    "rewards of a ghost": (
        {"advance": rewards(lambda r: {**r, "ghost": r["hen"]})},
        "rewards: expected the groups hen",
    ),
    "reward None": (
        {"advance": rewards(hens(constant(None)))},
        "rewards of 'hen': expected a tensor of float32 of shape (",
    ),
    "reward array": ({"advance": rewards(hens(torch.Tensor.numpy))}, ", got ndarray"),
    "reward half": ({"advance": rewards(hens(torch.Tensor.half))}, "got float16 of sh"),
    "reward int": ({"advance": rewards(hens(torch.Tensor.long))}, "got int64 of shape"),
    "reward shape": (
        {"advance": rewards(hens(lambda r: r[..., None]))},
        "rewards of 'hen': expected a tensor of float32 of shape (",
    ),
    "ends None": (
        {"advance": ends(constant(None))},
        "terminated: expected a tensor of bool of shape (",
    ),
    "ends shape ()": ({"advance": ends(lambda e: e.any())}, "got bool of shape"),
    "ends int": ({"advance": ends(torch.Tensor.long)}, "got int64 of shape ("),
    "observe None": (
        {"observe": constant(None)},
        "observations: expected a dict by group, got None",
    ),
    "observe tokens": ({"observe": lambda o: o["hen"]}, "by group, got Tokens"),
    "observe a ghost": (
        {"observe": lambda o: {**o, "ghost": o["hen"]}},
        "observations: expected the groups hen",
    ),
    "observe a tuple": (
        {"observe": hens(tuple)},
        "of 'hen': expected Tokens, got tupl",
    ),
    "feature width": (
        shown(features=lambda f: f[..., :2]),
        "features of 'hen': expected a tensor of float32 of shape (",
    ),
    "features int": (shown(features=torch.Tensor.long), "features of 'hen': expected"),
    "features with gradient": (
        shown(features=torch.Tensor.requires_grad_),
        "features of 'hen': expected a tensor without gradient, got one that requires",
    ),
    "one token": (shown(types=lambda t: t[..., :1]), "types of 'hen': expected a tens"),
    "types float": (shown(types=torch.Tensor.float), "types of 'hen': expected a tens"),
    "padding None": (shown(padding=constant(None)), "padding of 'hen': expected a ten"),
    "padding int": (shown(padding=torch.Tensor.int), "padding of 'hen': expected a te"),
    "a mask": (
        shown(action_mask=constant(torch.ones(1, 1, 9).bool())),
        "action_mask of 'hen': expected a tensor of bool of shape (",
    ),
    "active None": (
        {"active": constant(None)},
        "active: expected a dict by group, got",
    ),
    "active shape": (
        {"active": hens(lambda a: a[:, 0])},
        "active of 'hen': expected a tensor of bool of shape (",
    ),
    "alive list": (
        {"alive": hens(torch.Tensor.tolist)},
        "alive of 'hen': expected a tensor of bool of shape (",
    ),
}
LIVES: dict[str, tuple[dict[str, Change], str]] = {
    "nobody": (
        dict.fromkeys(
            ("active", "alive"),
            lambda lives: {name: torch.zeros_like(m) for name, m in lives.items()},
        ),
        "alive: expected at least one agent while the episode runs, got none in envi",
    ),
    "the dead act": (
        {"active": hens(torch.ones_like)},
        "active: expected agents that are alive, got agent 1 of group 'hen' in envir",
    ),
    "the living wait": (
        {"active": hens(torch.zeros_like)},
        "alive: expected the active agents only, since turn_based is False, got agen",
    ),
    "the dead earn": (
        {"advance": rewards(hens(torch.ones_like))},
        "rewards: expected 0 for an agent that is not alive, got 1 of agent 1 of gro",
    ),
    "the dead earn NaN": (
        {"advance": rewards(hens(lambda r: torch.where(r > 0, r, torch.nan)))},
        "rewards: expected 0 for an agent that is not alive, got nan of agent 1 of g",
    ),
}
TYPES = {
    "too large": (
        shown(types=lambda t: t + 1),
        "types of 'hen': expected numbers below 2, got 2 of agent 0",
    ),
    "below 0": (
        shown(types=lambda t: t - 1),
        "types of 'hen': expected numbers below 2, got -1 of agent 0",
    ),
}
NAME = f"{__name__}:Yard"


def run_out(_: Any) -> None:
    raise StopIteration("no map is left")


def policies(env: BatchedEnv) -> dict[str, RandomPolicy]:
    return {name: RandomPolicy(g.action_space) for name, g in env.groups.items()}


def train(**options: Any) -> None:
    env = Yard(3, **options)
    Rollout(env, policies(env), explore=True).steps(6)


def train_on_a_gpu(**options: Any) -> None:
    env = Yard(3, **options)
    Rollout(env, policies(env), explore=True, sync_free=True).steps(6)


def gather(**options: Any) -> None:
    """Play as DAgger does."""
    env = Yard(3, **options)
    Rollout(env, policies(env)).advance(6)


def evaluate(**options: Any) -> None:
    env = Yard(3, **options)
    Rollout(env, policies(env)).episodes()


def view(**options: Any) -> None:
    env = make_env(NAME, **options)
    env.reset(seed=0)
    while env.agents:
        env.step(dict.fromkeys(env.agents, 0))


def view_many(*, alone: bool = True, **options: Any) -> None:
    env = OneAgentVectorView(NAME, 3, alone=alone, **options)
    env.reset(seed=0)
    for _ in range(6):
        env.step(np.zeros(3, np.int64))


PATHS = [train, train_on_a_gpu, gather, evaluate, view]


@pytest.mark.parametrize("play", [*PATHS, check_env])
def test_env_without_a_fault_passes(play):
    if play is check_env:
        assert not any(check_env(NAME).values())
    else:
        play()
        play(alone=True)


# Each part fails at the first and at a later step, of one agent and of several.
@pytest.mark.parametrize(
    ("case", "play", "after", "alone"),
    [
        (case, play, 2 * ((i + j) % 2), play is view_many or (i // 2 + j) % 2 == 0)
        for i, case in enumerate(FORMS)
        for j, play in enumerate([*PATHS, view_many])
    ],
)
def test_results_of_another_form_are_refused(monkeypatch, case, play, after, alone):
    faults, message = FORMS[case]
    monkeypatch.setattr(Yard, "faults", faults)
    with pytest.raises(InputError) as error:
        play(after=after, alone=alone)
    assert str(error.value).startswith("Yard: ")
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("case", "play"),
    [
        (case, play)
        for case in LIVES | TYPES
        for play in PATHS
        if case in LIVES or play is not gather
    ],
)
def test_values_against_the_rules_are_refused(monkeypatch, case, play):
    faults, message = (LIVES | TYPES)[case]
    monkeypatch.setattr(Yard, "faults", faults)
    with pytest.raises(InputError) as error:
        play(after=2)
    assert str(error.value).startswith(f"Yard: {message}")
    step = 2 + message.startswith("rewards")
    assert str(error.value).endswith(f" in environment 0 at step {step}")


def test_a_step_is_counted_in_its_episode(monkeypatch):
    env = Yard(2, max_steps=5)
    rollout = Rollout(env, policies(env))
    rollout.steps(7)
    monkeypatch.setattr(Yard, "faults", LIVES["the dead earn"][0])
    with pytest.raises(InputError, match="environment 0 at step 3$"):
        rollout.steps(9)


@pytest.mark.parametrize("play", [*PATHS, view_many])
@pytest.mark.parametrize("part", ["advance", "observe"])
def test_an_iterator_that_is_used_up_ends_no_loop_of_others(monkeypatch, play, part):
    monkeypatch.setattr(Yard, "faults", {part: run_out})
    with pytest.raises(EnvExitError) as error:
        play(after=2)
    line = described(error.value)
    assert line.startswith("EnvExitError: StopIteration: no map is left (")
    assert f"{Path(__file__).name}:{run_out.__code__.co_firstlineno + 1})" in line


PRECISIONS = {
    "features": (
        shown(features=torch.Tensor.double),
        "hen: features: expected torch.float32, got torch.float64",
    ),
    "rewards": (
        {"advance": rewards(hens(torch.Tensor.double))},
        "hen: dtype of rewards: expected torch.float32, got torch.float64",
    ),
}
"""What evaluation, which acts in float64, may return, and training may not."""
ALL = FORMS | LIVES | TYPES | PRECISIONS


@pytest.mark.parametrize("case", ALL)
def test_check_env_reports_each_fault(monkeypatch, case):
    faults, message = ALL[case]
    monkeypatch.setattr(Yard, "faults", faults)
    problems = check_env(NAME, after=2).values()
    assert any(message in problem for problem in problems)
    # Never Python's own words.
    assert not any("expected no error" in problem for problem in problems)


class Stepping(Yard):
    """An env that overrides `BatchedEnv.step`."""

    def step(self, actions: Any) -> Any:
        step = super().step(actions)
        return step._replace(truncated=self.faulty("truncated", step.truncated))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            torch.Tensor.long,
            "truncated: expected a tensor of bool of shape (3,), got i",
        ),
        (lambda ends: ends[:, None], "of shape (3,), got bool of shape (3, 1)"),
        (torch.zeros_like, "truncated after max_steps: expected True, got False"),
    ],
)
def test_check_env_names_wrong_time_limits(monkeypatch, change, message):
    monkeypatch.setattr(Stepping, "faults", {"truncated": change})
    problems = check_env(f"{__name__}:Stepping", after=2)
    rule = next(name for name in problems if name.startswith("rewards and ends"))
    assert message in problems[rule]


@pytest.mark.parametrize("case", ["rewards None", "observe a ghost", "the dead earn"])
def test_evaluate_and_check_env_command_report_faults(monkeypatch, capsys, case):
    faults, message = (FORMS | LIVES)[case]
    monkeypatch.setattr(Yard, "faults", faults)
    env = {"name": NAME, "after": 2}
    with pytest.raises(InputError, match="Yard: "):
        marl_pool.evaluate(
            {
                name: lambda seen: np.zeros(len(seen["types"]), np.int64)
                for name in ("hen", "fox")
            },
            env=env,
            suite={"perturbations": []},
            episodes=2,
        )
    assert cli.main(["check-env", f"env={NAME}", "+env.after=2"]) == 1
    output = capsys.readouterr()
    assert message in output.out
    assert "Traceback" not in output.out + output.err


class Turns(Yard):
    """The fox waits while the hens act."""

    turn_based = True

    def living(self) -> dict[str, torch.Tensor]:
        return super().living()

    @property
    def active(self) -> Any:
        turn = (self.steps % 2 == 0)[:, None]
        living = self.living()
        return {"hen": living["hen"] & turn, "fox": living["fox"] & ~turn}


@pytest.mark.parametrize("sync_free", [False, True])
def test_agents_that_take_turns_may_wait_but_the_dead_earn_nothing(
    monkeypatch, sync_free
):
    env = Turns(3)
    Rollout(env, policies(env), sync_free=sync_free).steps(9)
    monkeypatch.setattr(Turns, "faults", LIVES["the dead earn"][0])
    rollout = Rollout(Turns(3, after=3), policies(env), sync_free=sync_free)
    with pytest.raises(InputError, match=r"got 1 of agent 1 of group 'hen' .* step 4"):
        rollout.steps(9)


EMPTY = AgentGroup(0, TokenSpec(2, 3, ("self", "grain")), spaces.Discrete(2))


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (None, "groups: expected a dict of AgentGroup by name, got None"),
        ({}, "groups: expected a dict of AgentGroup by name, got an empty one"),
        ({"hen": 3}, r"groups\['hen'\]: expected AgentGroup, got int"),
        ({4: None}, "groups: expected names, got 4"),
        ({"hen": EMPTY}, "num_agents of 'hen': expected at least 1, got 0"),
    ],
)
def test_an_environment_declares_its_groups(monkeypatch, groups, message):
    construct = Yard.__init__

    def init(self, num_envs: int, *, max_steps: int = 6, **common: Any) -> None:
        construct(self, num_envs, max_steps=max_steps, **common)
        self.groups = groups

    monkeypatch.setattr(Yard, "__init__", init)
    for build in (make_env, check_env):
        with pytest.raises(InputError, match=f"^Yard: {message}"):
            build(NAME)


# Numbers and seeds of views


@pytest.mark.parametrize(("value", "after"), [(np.nan, 0), (np.inf, 2), (-np.inf, 2)])
@pytest.mark.parametrize("play", [view, view_many])
@pytest.mark.parametrize(
    ("faults", "part"),
    [
        (lambda v: {"advance": rewards(hens(lambda r: r * v))}, "rewards"),
        (lambda v: shown(features=lambda f: f + v), "observations"),
    ],
)
def test_views_refuse_numbers_that_are_not_finite(
    monkeypatch, faults, part, play, value, after
):
    monkeypatch.setattr(Yard, "faults", faults(value))
    message = (
        f"NaN or infinite: {part} of .* of group 'hen' in environment 0 at step "
        f"{after + (part == 'rewards')}"
    )
    with pytest.raises(InputError, match=message):
        play(after=after, alone=True)


@pytest.mark.parametrize(
    "seed", ["x", "3", 1.5, 1.0, True, -1, 1 << 63, [1], np.ones(2)]
)
@pytest.mark.parametrize(
    "build",
    [
        make_env,
        lambda name, **options: gymnasium.make(
            "marl_pool/cartpole-v0", disable_env_checker=True
        ),
        lambda name, **options: OneAgentVectorView(name, 2, **options),
        lambda name, **options: marl_pool.perturb_env(
            make_env(name, **options), "jitter"
        ),
    ],
)
def test_a_seed_is_an_integer(build, seed):
    env = build(NAME, alone=True)
    with pytest.raises(InputError, match="seed"):
        env.reset(seed=seed)


@pytest.mark.parametrize("seed", [0, 7, np.int64(7), np.uint8(7), (1 << 63) - 1])
def test_integers_of_numpy_are_seeds(seed):
    first, again = (make_env(NAME).reset(seed=s)[0] for s in (seed, int(seed)))
    assert np.array_equal(first["hen_0"]["features"], again["hen_0"]["features"])


@pytest.mark.parametrize("agent", ["hen", "hen_2", "", None, 0])
def test_unknown_agents_are_named_with_those_that_exist(agent):
    env = make_env(NAME)
    env.reset(seed=0)
    for ask in (
        env.observation_space,
        env.action_space,
        lambda name: env.step({**dict.fromkeys(env.agents, 0), name: 0}),
    ):
        with pytest.raises(InputError) as error:
            ask(agent)
        assert f"expected agents of hen_0, hen_1, fox_0, got {agent!r}" in str(
            error.value
        )


@pytest.mark.parametrize(
    ("names", "value", "message"),
    [
        (("x", "y"), None, "'y': expected an attribute, a tensor with 2 rows"),
        (("log",), [], "'log': expected .*, got list"),
        (("log",), torch.zeros(5, 2), "'log': expected .*, got float32 of shape .5, 2"),
        (("log",), torch.zeros(()), "'log': expected .*, got float32 of shape"),
        (("log",), np.zeros(2), "'log': expected .*, got ndarray"),
        ((3,), None, "3: expected .*, got none of this name"),
        ("x", None, "expected a tuple of attributes, got 'x'"),
        (None, None, "expected a tuple of attributes, got None"),
    ],
)
def test_a_wrong_state_is_found_before_the_first_checkpoint(
    names, value, message, monkeypatch
):
    monkeypatch.setattr(Yard, "state_names", names)
    monkeypatch.setattr(Yard, "log", value, raising=False)
    env = Yard(2)
    policies = {
        name: RandomPolicy(group.action_space) for name, group in env.groups.items()
    }
    with pytest.raises(InputError, match=f"^Yard: state_names: {message}"):
        Rollout(env, policies)
    problems = check_env(f"{__name__}:Yard", after=99)
    problem = problems["a saved state continues exactly"]
    assert re.match(
        f"Yard: state_names: {message}".replace(" 2 rows", " 3 rows"), problem
    )
