"""A user's perturbation that breaks the contract is named, with what is wrong."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
from torch import Tensor
from typing_extensions import override

from helpers.perturbed import centroid
from marl_pool.api.perturb import perturb_env
from marl_pool.envs import make_batched_env, make_env
from marl_pool.envs.base import BatchedEnv
from marl_pool.perturbations import TokenShare, make_perturbation
from marl_pool.perturbations.actions import ActionPerturbation
from marl_pool.perturbations.base import Perturbation
from marl_pool.policies.random_policy import RandomPolicy
from marl_pool.rollout import Rollout
from marl_pool.tokens import Tokens
from marl_pool.utils.errors import InputError


@dataclass(kw_only=True, eq=False)
class Faulty(TokenShare):
    """A perturbation with the results of a function."""

    result: ClassVar[Callable[[Tokens], Any]]

    @override
    def apply(self, tokens: Tokens, state: Any) -> Any:
        return type(self).result(tokens)


@dataclass(kw_only=True, eq=False)
class FaultyActions(ActionPerturbation):
    """A perturbation that changes actions by a function."""

    changed: ClassVar[Callable[[Tensor], Any]]

    @override
    def change(self, actions: Tensor, *details: Any) -> Any:
        return type(self).changed(actions)


@dataclass(kw_only=True, eq=False)
class NoPair(TokenShare):
    """A perturbation that forgets the state."""

    @override
    def __call__(self, tokens: Tokens, state: Any) -> Any:
        return tokens

    @override
    def apply(self, tokens: Tokens, state: Any) -> Tokens:
        return tokens


@dataclass(kw_only=True, eq=False)
class NoSuper(NoPair):
    """A perturbation that does not call its base class."""

    @override
    def __post_init__(self) -> None:
        self.count = 1


RESULTS: list[tuple[Callable[[Tokens], Any], str]] = [
    (lambda tokens: None, "expected Tokens, got None"),
    (lambda tokens: (tokens, {}), "expected Tokens, got tuple"),
    (lambda tokens: tokens.features, "expected Tokens, got float32 of shape"),
    (
        lambda tokens: tokens._replace(features=tokens.features.double()),
        "expected features of float32, got float64",
    ),
    (
        lambda tokens: tokens._replace(features=tokens.features.numpy()),
        "expected features of float32, got ndarray",
    ),
    (
        lambda tokens: tokens._replace(types=tokens.types.float()),
        "expected types of int64, got float32",
    ),
    (
        lambda tokens: tokens._replace(padding=tokens.padding.long()),
        "expected padding of bool, got int64",
    ),
]


def rollout(perturbation: Perturbation, env: BatchedEnv | None = None) -> Rollout:
    env = env or centroid()
    policies = {
        name: RandomPolicy(group.action_space) for name, group in env.groups.items()
    }
    return Rollout(env, policies, perturbation=perturbation)


@pytest.mark.parametrize("severity", [1.0, [0.0, 1.0]])
@pytest.mark.parametrize(("result", "message"), RESULTS)
def test_a_result_of_another_form_is_named(result, message, severity, monkeypatch):
    monkeypatch.setattr(Faulty, "result", staticmethod(result), raising=False)
    with pytest.raises(InputError) as refusal:
        rollout(Faulty(severity=severity))
    assert str(refusal.value).startswith(f"perturbation 'Faulty': {message}")
    with pytest.raises(InputError, match="perturbation 'Faulty': expected "):
        perturb_env(make_env("simple_centroid"), Faulty(severity=severity))


@pytest.mark.parametrize(
    ("changed", "got"),
    [
        (lambda actions: None, "None"),
        (lambda actions: actions.double(), r"float64 of shape \(2, 1, 5\)"),
        (lambda actions: actions[..., 0], r"float32 of shape \(2, 1\)"),
    ],
)
def test_changed_actions_have_their_form(changed, got, monkeypatch):
    monkeypatch.setattr(FaultyActions, "changed", staticmethod(changed), raising=False)
    played = rollout(FaultyActions(), make_batched_env("simple_centroid", 2))
    message = (
        r"^perturbation 'FaultyActions': expected change\(\) to return "
        rf"float32 of shape \(2, 1, 5\), got {got}$"
    )
    with pytest.raises(InputError, match=message):
        played.advance(1)


def test_images_stay_images(monkeypatch):
    def scaled(tokens: Tokens) -> Tokens:
        return tokens._replace(features=tokens.features / 2)

    monkeypatch.setattr(Faulty, "result", staticmethod(scaled), raising=False)
    message = "perturbation 'Faulty': expected features of uint8, got float32"
    with pytest.raises(InputError, match=message):
        rollout(Faulty(severity=0.1), make_batched_env("pong", 1))


@pytest.mark.parametrize("play", [Rollout.steps, Rollout.advance])
def test_undeclared_types_are_the_fault_of_the_perturbation(play, monkeypatch):
    def moved(tokens: Tokens) -> Tokens:
        return tokens._replace(types=tokens.types + 7)

    monkeypatch.setattr(Faulty, "result", staticmethod(moved), raising=False)
    message = "perturbation 'Faulty' of SimpleCentroid: types of 'agent': expected "
    with pytest.raises(InputError, match=message):
        play(rollout(Faulty()), 2)


def test_an_environment_answers_for_its_types(monkeypatch):
    env = centroid()
    observe = env.observe

    def moved() -> dict[str, Tokens]:
        tokens = observe()["agent"]
        return {"agent": tokens._replace(types=tokens.types + 7)}

    monkeypatch.setattr(env, "observe", moved)
    perturbation = make_perturbation("jitter", severity=0.5)
    with pytest.raises(InputError, match="^SimpleCentroid: types of 'agent': expected"):
        rollout(perturbation, env).steps(2)


def test_a_call_returns_a_state_too():
    message = r"perturbation 'NoPair': expected \(Tokens, state\), got Tokens"
    with pytest.raises(InputError, match=message):
        rollout(NoPair())


def test_a_constructor_calls_its_base_class():
    message = r"perturbation 'NoSuper': expected a constructor that calls super\(\)"
    with pytest.raises(InputError, match=message):
        make_perturbation(f"{__name__}:NoSuper")
    with pytest.raises(InputError, match=message):
        rollout(NoSuper())
    with pytest.raises(InputError, match=message):
        perturb_env(make_env("simple_centroid"), NoSuper())
