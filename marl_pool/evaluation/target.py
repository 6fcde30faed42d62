"""Evaluation targets: policies, the environments to measure them in, and baselines."""

import copy
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from pydantic_core import to_jsonable_python

from marl_pool.compiled.choice import describe_kernels, use_kernels
from marl_pool.envs import ENVS, HEURISTICS, make_batched_env, make_heuristic
from marl_pool.envs.base import AgentGroup, BatchedEnv
from marl_pool.envs.description import EnvDescription, describe_env
from marl_pool.evaluation.callable_policy import CallablePolicy
from marl_pool.evaluation.cases import TransferEnv
from marl_pool.evaluation.settings import TransferSettings
from marl_pool.options.names import resolve, trust
from marl_pool.options.signatures import Option, options_of
from marl_pool.options.types import Kernels
from marl_pool.policies.base import Policy, SpecifiedPolicy
from marl_pool.policies.random_policy import RandomPolicy
from marl_pool.pooling.attention_neuron import AttentionNeuronPooling
from marl_pool.utils.errors import InputError, UnfitRuleError
from marl_pool.utils.randomness import EVALUATION_ENVS
from marl_pool.version import __version__, commit

Policies = dict[str, Policy]
"""A policy for each group of agents."""


@dataclass(frozen=True)
class EvaluationTarget:
    """Policies, and the environments to measure them in.

    Attributes:
        policies: policies by group, in float64; see `to_float64`.
        env: ``{"name": …, **options}`` of the environments.
        source: name of the run, or of whatever else is evaluated.
        trained_env: ``{"name": …, **options}`` of the training environments.
        seed: seed of the environments.
        device: device of policies and environments.
        fixed: groups that were not trained; baselines play with them too.
        plugins: ``package.module:Class`` names that ``env`` may use; None if the user
            chose the environment, rather than a file.
        checkpoint: ``"best"``, ``"last"`` or the number of an iteration; empty for
            policies that do not come from a run.
        iteration: iteration of training, if known.
        training: further entries about the run's training, for the results.
    """

    policies: Policies
    env: dict[str, Any]
    source: str
    trained_env: Mapping[str, Any]
    seed: int = 0
    device: str = "cpu"
    fixed: frozenset[str] = frozenset()
    plugins: frozenset[str] | None = None
    checkpoint: str | int = ""
    iteration: int | None = None
    training: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The checkpoint, with its iteration where that adds something."""
        if self.iteration is None or self.iteration == self.checkpoint:
            return str(self.checkpoint)
        return f"{self.checkpoint} (iteration {self.iteration})"

    def title(self, episodes: int) -> str:
        """Return the title of a table of ``episodes`` episodes."""
        parts = (self.env["name"], self.env.get("module"))
        env = " ".join(part for part in parts if isinstance(part, str))
        return f"{self.source}: {env}, {episodes} episodes, checkpoint {self.name}"

    def validate_fit(self, source: str) -> None:
        """Raise `InputError` if the policies cannot act in the environment."""
        if reason := misfit(self.policies, self.describe().groups):
            raise InputError(
                f"{source} does not fit the env {self.env['name']}: {reason}"
            )

    def record(self, episodes: int, kernels: Kernels = "auto") -> dict[str, Any]:
        """Return the entries that hold for all rows, each of ``episodes`` episodes.

        ``kernels`` are those that were chosen; see `use_kernels`.
        """
        with use_kernels(kernels, self.device):
            computed_by = describe_kernels(self.device)
        # "changed" has the options that differ from the training environment, where a
        # run of an earlier version lacks the newest ones.
        defaults = {
            key: to_jsonable_python(option.default)
            for key, option in self._parameters().items()
            if key in self.env and not option.required
        }
        trained = {**defaults, **self.trained_env}
        return {
            "run": self.source,
            "env": self.env,
            "changed": {
                key: value
                for key, value in self.env.items()
                if key not in trained or trained[key] != value
            },
            "episodes": episodes,
            "seed": self.seed,
            "checkpoint": self.checkpoint,
            "iteration": self.iteration,
            "package_version": __version__,
            "commit": commit(),
            "kernels": computed_by,
            **self.training,
        }

    def make_env(self, num_envs: int, first: int = 0, **changes: Any) -> BatchedEnv:
        """Make evaluation environments ``first`` to ``first + num_envs - 1``.

        They are not yet reset. The same numbers and seed give the same episodes.
        ``changes`` override options of the env.
        """
        with self._trusted():
            return make_batched_env(
                num_envs=num_envs,
                seed=self.seed,
                first_env=EVALUATION_ENVS + first,
                device=self.device,
                **{**self.env, **changes},
            )

    def describe(self, **changes: Any) -> EnvDescription:
        """Describe the evaluation environments, with some options changed."""
        with self._trusted():
            return describe_env({**self.env, **changes})

    def _parameters(self) -> Mapping[str, Option]:
        """Return the options of the environment's constructor."""
        with self._trusted():
            return options_of(resolve(self.env["name"], ENVS, "env", BatchedEnv))

    def _trusted(self) -> AbstractContextManager[None]:
        return nullcontext() if self.plugins is None else trust(self.plugins)

    def transfer_env(self, settings: TransferSettings, num_envs: int) -> TransferEnv:
        """Prepare other environments, in which the policies play unperturbed.

        An option that the env lacks, a rule for entities that its task lacks, or tokens
        that the policies cannot take, is recorded as the reason why there are no
        numbers.

        Raises:
            InputError: a value that the env rejects.
        """
        # Look for a reason why there can be no numbers before building baselines.
        changes, policies = settings.env, self.policies
        baselines: dict[str, Policies] = {}
        parameters = self._parameters()
        if missing_key := next((key for key in changes if key not in parameters), None):
            missing = f"env {self.env['name']} has no {missing_key}"
        else:
            try:
                description = self.describe(**changes)
                missing = misfit(policies, description.groups)
                # Simulators are too slow to play baselines in as well.
                if not missing and not description.simulated:
                    baselines = self.baselines(**changes)
            except UnfitRuleError as error:
                missing = str(error)
        return TransferEnv(
            settings.label,
            dict(changes),
            partial(self.make_env, num_envs, **changes),
            rescaled(policies) if settings.rescale_codes else policies,
            baselines,
            missing,
            {"rescale_codes": True} if settings.rescale_codes else {},
        )

    def baselines(self, **changes: Any) -> dict[str, Policies]:
        """Return the random policy, and the env's heuristic if it has one.

        They replace the policies that learned; the other groups stay as in training.
        ``changes`` override options of the env.
        """
        env, groups = self.env["name"], self.describe(**changes).groups
        baselines: dict[str, Policies] = {
            "random": {
                name: RandomPolicy(group.action_space) for name, group in groups.items()
            }
        }
        if env in HEURISTICS:
            baselines["heuristic"] = {
                name: make_heuristic(env, group, role=name)
                for name, group in groups.items()
            }
        # Groups that were not trained play as they did in training.
        fixed = {name: self.policies[name] for name in self.fixed}
        return {
            name: to_float64({**policies, **fixed}, self.device)
            for name, policies in baselines.items()
        }


def to_float64(policies: Mapping[str, Policy], device: str = "cpu") -> Policies:
    """Copy policies in float64, for evaluation.

    The environment stays in float32. The order in which a policy sums its tokens then
    only affects bits that are lost when its action is rounded, so a permutation of the
    observation changes no action. In float32 the last bits of the actions would depend
    on the order, and after some steps the trajectory too. (An action whose float64
    value lies within its own error of a float32 rounding boundary still could: about
    one number in 10^8.)
    """
    copies = copy.deepcopy(dict(policies))
    return {name: policy.double().to(device).eval() for name, policy in copies.items()}


def rescaled(policies: Mapping[str, Policy]) -> Policies:
    """Copy policies so that more tokens do not give larger codes than in training.

    AttentionNeuron's codes are sums over tokens. They are multiplied by the number of
    tokens in training (``expected_tokens``), divided by the number present. Means, and
    other heads, are unchanged.

    Source: Tang and Ha (2021, https://arxiv.org/abs/2109.02869), footnote 3. The factor
    is applied inside the tanh, so that duplicated inputs give exactly the codes of
    single ones.
    """
    copies = copy.deepcopy(dict(policies))
    for policy in copies.values():
        for head in policy.modules():
            if isinstance(head, AttentionNeuronPooling) and head.activation == "tanh":
                assert isinstance(policy, SpecifiedPolicy)
                head.expected_tokens = policy.spec.num_tokens
    return copies


def misfit(policies: Mapping[str, Policy], groups: Mapping[str, AgentGroup]) -> str:
    """Return why policies cannot act in an environment, or an empty string."""
    for name, group in groups.items():
        policy = policies.get(name)
        if policy is None:
            return f"expected a policy of {name!r}, got {', '.join(policies)}"
        reason = ""
        if isinstance(policy, SpecifiedPolicy):
            reason = policy.mismatch(group.tokens, group.action_space)
        elif isinstance(policy, CallablePolicy):
            reason = policy.mismatch(group)
        if reason:
            return f"the policy of {name!r}: {reason}"
    if foreign := [name for name in policies if name not in groups]:
        return f"expected a group {foreign[0]!r}, got {', '.join(groups)}"
    return ""
