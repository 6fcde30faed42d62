"""What is evaluated or rendered: a run's policies, its worlds, and baselines."""

import copy
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from marl_pool.envs import ENVS, HEURISTICS, make_batched_env, make_heuristic
from marl_pool.envs.base import World
from marl_pool.envs.scripted import is_plug_in, is_scripted, scripted_policy
from marl_pool.errors import InputError
from marl_pool.names import check_trusted, resolve
from marl_pool.perturbations import make_perturbation
from marl_pool.perturbations.base import Perturbation
from marl_pool.policies.base import Policy
from marl_pool.policies.random_policy import RandomPolicy
from marl_pool.policies.storage import load_policies
from marl_pool.randomness import EVALUATION_WORLDS
from marl_pool.runs import iteration_of

if TYPE_CHECKING:
    from marl_pool.runs import Run

Policies = dict[str, Policy]
"""A policy for each group of agents."""


@dataclass(frozen=True)
class Subject:
    """A run's policies, and the worlds to measure them in.

    Attributes:
        policies: by group, in float64; see `in_double`.
        env: ``{"name": …, **options}``.
        seed: of the worlds.
        device: of policies and worlds.
        checkpoint: which of the run's policies: best, last or an iteration.
        iteration: of training, where it is known.
        fixed: the groups that did not learn; a baseline meets them too.
    """

    policies: Policies
    env: dict[str, Any]
    seed: int
    device: str
    checkpoint: str | int
    iteration: int | None
    fixed: frozenset[str] = frozenset()

    @classmethod
    def load(
        cls, run: "Run", settings: Mapping[str, Any], plugins: Collection[str] = ()
    ) -> "Subject":
        """Read a run.

        Args:
            run: an earlier run.
            settings: with ``checkpoint``, ``seed`` and ``device``.
            plugins: ``package.module:Class`` names that the run may use.

        Raises:
            InputError: no such policy, or no such device.
        """
        which, device = settings["checkpoint"], settings["device"]
        _check_device(device)
        _check_env(run.config["env"], plugins, run.path)
        policies = load_policies(run.policy_path(which), plugins=plugins)
        return cls(
            in_double({**policies, **_scripted(run, plugins)}, device),
            dict(run.config["env"]),
            settings["seed"],
            device,
            which,
            _iteration(run, which),
            frozenset(run.config.get("fixed") or ()),
        )

    @property
    def name(self) -> str:
        """The checkpoint in words."""
        if self.iteration is None or self.iteration == self.checkpoint:
            return str(self.checkpoint)
        return f"{self.checkpoint} (iteration {self.iteration})"

    def worlds(self, count: int, first: int = 0) -> World:
        """Evaluation worlds ``first`` to ``first + count - 1``, not yet reset."""
        return make_batched_env(
            num_envs=count,
            seed=self.seed,
            first_world=EVALUATION_WORLDS + first,
            device=self.device,
            **self.env,
        )

    def baselines(self) -> dict[str, Policies]:
        """The random policy, and the heuristic of the env if it has one.

        They take the place of what learned; the other groups are played as in training.
        """
        groups = self.worlds(1).groups
        found: dict[str, Policies] = {
            "random": {
                name: RandomPolicy(group.action_space) for name, group in groups.items()
            }
        }
        env = self.env["name"]
        if env in HEURISTICS:
            found["heuristic"] = {
                name: make_heuristic(env, group, role=name)
                for name, group in groups.items()
            }
        kept = {name: self.policies[name] for name in self.fixed}
        return {
            name: in_double({**played, **kept}, self.device)
            for name, played in found.items()
        }


def in_double(policies: Mapping[str, Policy], device: str = "cpu") -> Policies:
    """Copy policies in float64, for evaluation.

    The world stays in float32. So the order in which a policy sums is lost when its
    action is rounded, and a permutation of what it sees changes nothing that it does.
    In float32 the last bits of the actions would depend on the order, and after some
    steps the trajectory too. (An action whose float64 value lies within its own error
    of a float32 rounding boundary still could: about one number in 10^8.)
    """
    copies = copy.deepcopy(dict(policies))
    return {name: policy.double().to(device).eval() for name, policy in copies.items()}


def perturb(options: Mapping[str, Any], world: World) -> Perturbation:
    """Build the perturbation ``{"name": …, **options}`` for the groups of a world.

    Raises:
        InputError: an unknown name or a wrong option.
    """
    specs = [group.tokens for group in world.groups.values()]
    return make_perturbation(specs=specs, **options)


@contextmanager
def cpu_threads(count: int | None) -> Iterator[None]:
    """Let torch use ``count`` threads for a while; None leaves it as it is."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _scripted(run: "Run", plugins: Collection[str]) -> Policies:
    """Policies of the groups that the run's configuration gives to a script."""
    env, fixed = run.config["env"], run.config.get("fixed") or {}
    names = {group: name for group, name in fixed.items() if is_scripted(name)}
    if not names:
        return {}
    for name in filter(is_plug_in, names.values()):
        check_trusted(name, {}, "policy", plugins, run.path)
    groups = make_batched_env(num_envs=1, **env).groups
    return {
        group: scripted_policy(name, env=env["name"], role=group, group=groups[group])
        for group, name in names.items()
    }


def _check_env(env: Mapping[str, Any], plugins: Collection[str], path: Path) -> None:
    """Refuse code that the run's configuration names and nobody vouched for."""
    check_trusted(env["name"], ENVS, "env", plugins, path)
    world = resolve(env["name"], ENVS, "env", World)
    assert issubclass(world, World)
    for option, own in world.imports.items():
        if env.get(option) is not None:
            check_trusted(env[option], own, f"env.{option}", plugins, path)


def _check_device(device: str) -> None:
    try:
        torch.empty(1, dtype=torch.float64, device=device)
    except (RuntimeError, TypeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise InputError(
            f"device: expected one that is here and computes in float64, "
            f"got {device!r}: {reason}"
        ) from error


def _iteration(run: "Run", which: str | int) -> int | None:
    if which == "best":
        return run.best.iteration if run.best else None
    if which == "last":
        newest = run.latest_checkpoint()
        return iteration_of(newest) if newest else None
    return int(which)
