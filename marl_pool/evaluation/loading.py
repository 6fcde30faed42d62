"""What is evaluated or rendered: a run's policies, its worlds, and baselines."""

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from marl_pool.envs import ENVS, HEURISTICS, make_batched_env, make_heuristic
from marl_pool.envs.base import AgentGroup, BatchedEnv
from marl_pool.envs.scripted import is_scripted, scripted_policy
from marl_pool.evaluation.cases import TransferEnv
from marl_pool.policies.base import Policy, SpecifiedPolicy
from marl_pool.policies.random_policy import RandomPolicy
from marl_pool.policies.storage import load_modules
from marl_pool.pooling.attention_neuron import AttentionNeuronPooling
from marl_pool.runs import iteration_of
from marl_pool.utils.errors import InputError
from marl_pool.utils.names import resolve, trust
from marl_pool.utils.randomness import EVALUATION_WORLDS
from marl_pool.utils.signatures import options_of

if TYPE_CHECKING:
    from marl_pool.runs import Run

Policies = dict[str, Policy]
"""A policy for each group of agents."""


@dataclass(frozen=True)
class EvaluationTarget:
    """A run's policies, and the worlds to measure them in.

    Attributes:
        policies: by group, in float64; see `to_float64`.
        env: ``{"name": …, **options}`` of the worlds.
        trained_env: the same of those that the policy was trained in.
        seed: of the worlds.
        device: of policies and worlds.
        checkpoint: which of the run's policies: best, last or an iteration.
        iteration: of training, where it is known.
        fixed: the groups that did not learn; a baseline meets them too.
        plugins: names from outside the package that ``env`` may use; None for an
            environment that the user chose, not a file.
    """

    policies: Policies
    env: dict[str, Any]
    trained_env: dict[str, Any]
    seed: int
    device: str
    checkpoint: str | int
    iteration: int | None
    fixed: frozenset[str] = frozenset()
    plugins: frozenset[str] | None = None

    @classmethod
    def load(
        cls, run: "Run", settings: Mapping[str, Any], plugins: Collection[str] = ()
    ) -> "EvaluationTarget":
        """Read a run.

        Args:
            run: an earlier run.
            settings: with ``checkpoint``, ``seed``, ``device`` and ``rescale_codes``;
                ``env`` is the world's, None for the run's own.
            plugins: ``package.module:Class`` names that the run may use.

        Raises:
            InputError: no such policy, one that does not fit the world, or no such
                device.
        """
        with trust(plugins, run.path):
            return cls._load(run, settings, plugins)

    @classmethod
    def _load(
        cls, run: "Run", settings: Mapping[str, Any], plugins: Collection[str]
    ) -> "EvaluationTarget":
        which, device = settings["checkpoint"], settings["device"]
        check_device(device)
        trained_env = dict(run.env)
        env = dict(settings.get("env") or trained_env)
        groups = make_batched_env(num_envs=1, **env).groups
        fixed = _fixed(run, groups)
        folder = run.policy_path(which)
        scripted = {
            group: scripted_policy(
                name, env=env["name"], role=group, group=groups[group]
            )
            for group, name in fixed.items()
            if is_scripted(name)
        }
        policies = {**_load(folder, groups, scripted, plugins), **scripted}
        subject = cls(
            to_float64(policies, device),
            env,
            trained_env,
            settings["seed"],
            device,
            which,
            _iteration(run, which),
            frozenset(fixed),
            frozenset(plugins),
        )
        reason = misfit(subject.policies, subject.make_env(1))
        if reason:
            raise InputError(f"{run.path} does not fit the env {env['name']}: {reason}")
        if settings.get("rescale_codes"):
            return replace(subject, policies=rescaled(subject.policies))
        return subject

    @property
    def name(self) -> str:
        """The checkpoint in words."""
        if self.iteration is None or self.iteration == self.checkpoint:
            return str(self.checkpoint)
        return f"{self.checkpoint} (iteration {self.iteration})"

    def make_env(self, count: int, first: int = 0, **changes: Any) -> BatchedEnv:
        """Evaluation worlds ``first`` to ``first + count - 1``, not yet reset.

        Args:
            count: how many.
            first: the number of the first.
            **changes: options of the env that differ.
        """
        with nullcontext() if self.plugins is None else trust(self.plugins):
            return make_batched_env(
                num_envs=count,
                seed=self.seed,
                first_env=EVALUATION_WORLDS + first,
                device=self.device,
                **{**self.env, **changes},
            )

    def others(
        self, changes: Sequence[Mapping[str, Any]], count: int
    ) -> list[TransferEnv]:
        """Build the rows of other worlds.

        What the env cannot do, or the policies cannot play, is a gap.

        Args:
            changes: `marl_pool.evaluation.settings.EnvChange`, as plain data.
            count: worlds of each.

        Raises:
            InputError: a value that the env refuses.
        """
        return [self._other(change, count) for change in changes]

    def _other(self, change: Mapping[str, Any], count: int) -> TransferEnv:
        env, policies = change["env"], self.policies
        lacking = self._lacks(env)
        gap = f"env {self.env['name']} has no {lacking}" if lacking else ""
        if not gap:
            gap = misfit(policies, self.make_env(1, **env))
        if change["rescale_codes"]:
            policies = rescaled(policies)
        make = partial(self.make_env, count, **env)
        baselines: dict[str, Policies] = {}
        if not gap and not self.make_env(1, **env).simulated:
            baselines = self.baselines(**env)
        return TransferEnv(change["label"], dict(env), make, policies, baselines, gap)

    def _lacks(self, env: Mapping[str, Any]) -> str:
        """The first option that the world's class lacks; empty if none."""
        known = options_of(resolve(self.env["name"], ENVS, "env", BatchedEnv))
        return next((key for key in env if key not in known), "")

    def baselines(self, **changes: Any) -> dict[str, Policies]:
        """The random policy, and the heuristic of the env if it has one.

        They take the place of what learned; the other groups are played as in training.

        Args:
            **changes: options of the env that differ.
        """
        groups = self.make_env(1, **changes).groups
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
            name: to_float64({**played, **kept}, self.device)
            for name, played in found.items()
        }


def to_float64(policies: Mapping[str, Policy], device: str = "cpu") -> Policies:
    """Copy policies in float64, for evaluation.

    The world stays in float32. So the order in which a policy sums is lost when its
    action is rounded, and a permutation of what it sees changes nothing that it does.
    In float32 the last bits of the actions would depend on the order, and after some
    steps the trajectory too. (An action whose float64 value lies within its own error
    of a float32 rounding boundary still could: about one number in 10^8.)
    """
    copies = copy.deepcopy(dict(policies))
    return {name: policy.double().to(device).eval() for name, policy in copies.items()}


def rescaled(policies: Mapping[str, Policy]) -> Policies:
    """Copy policies so that more tokens make no larger codes than in training.

    AttentionNeuron's codes are sums over tokens; they are multiplied by the number of
    tokens that the policy was made for over those that are present
    (``expected_tokens``). Means, and other heads, stay as they are.

    Source: Tang and Ha (2021), footnote 3; inside the tanh, which makes inputs that are
    there twice exactly those that are there once.
    """
    copies = copy.deepcopy(dict(policies))
    for policy in copies.values():
        for part in policy.modules():
            if isinstance(part, AttentionNeuronPooling) and part.activation == "tanh":
                assert isinstance(policy, SpecifiedPolicy)
                part.expected_tokens = policy.spec.num_tokens
    return copies


def changed(trained: Mapping[str, Any], played: Mapping[str, Any]) -> dict[str, Any]:
    """The options of the world played that the trained one had not."""
    return {
        key: value
        for key, value in played.items()
        if key not in trained or trained[key] != value
    }


def misfit(policies: Mapping[str, Policy], world: BatchedEnv) -> str:
    """Why policies cannot play in a world; empty if they can.

    Those of other groups than the world's are no misfit of this kind.
    """
    for name, group in world.groups.items():
        policy = policies.get(name)
        if isinstance(policy, SpecifiedPolicy):
            reason = policy.misfit(group.tokens, group.action_space)
            if reason:
                return f"the policy of {name!r}: {reason}"
    return ""


@contextmanager
def cpu_threads(count: int | None) -> Iterator[None]:
    """Let torch use ``count`` threads for a while; None leaves it as it is."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _load(
    folder: Path, played: Collection[str], others: Policies, plugins: Collection[str]
) -> Policies:
    """The saved policies; one that names no group plays all groups but ``others``."""
    modules, groups = load_modules(folder, plugins=plugins)
    if not groups and len(modules) == 1:
        (only,) = modules
        groups = {name: only for name in played if name not in others}
    return {group: modules[module] for group, module in groups.items()}


def _fixed(run: "Run", groups: Mapping[str, AgentGroup]) -> dict[str, str]:
    """What plays each group that did not learn, as the run's configuration says.

    Raises:
        InputError: it is no mapping of the environment's groups to names, or leaves no
            group that learned.
    """
    fixed = run.config.get("fixed") or {}
    where = f"{run.path}/config.yaml: fixed"
    if not isinstance(fixed, Mapping) or not all(
        isinstance(name, str) for name in fixed.values()
    ):
        raise InputError(f"{where}: expected names by group, got {fixed!r:.80}")
    for group in fixed:
        if group not in groups:
            raise InputError(
                f"{where}: expected groups among {', '.join(groups)}, got {group!r}"
            )
    if set(fixed) == set(groups):
        raise InputError(
            f"{where}: expected at least one group that learned, got all: "
            f"{', '.join(fixed)}"
        )
    return dict(fixed)


def check_device(device: str) -> None:
    """Refuse a device that is not here or does not compute in float64.

    Raises:
        InputError: such a one.
    """
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
        newest = next(reversed(run.checkpoints()), None)
        return iteration_of(newest) if newest else None
    return int(which)
