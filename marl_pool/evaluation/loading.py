"""Evaluation targets: policies, the environments to measure them in, and baselines."""

import copy
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from marl_pool.compiled.choice import describe_kernels, use_kernels
from marl_pool.envs import ENVS, HEURISTICS, make_batched_env, make_heuristic
from marl_pool.envs.base import AgentGroup, BatchedEnv
from marl_pool.envs.description import EnvDescription, describe_env
from marl_pool.envs.pettingzoo.workers import kept_workers
from marl_pool.envs.scripted import is_scripted, scripted_policy
from marl_pool.envs.timeout import EnvTimeoutError, limit_calls, raised_by
from marl_pool.evaluation.callable_policy import Act, CallablePolicy
from marl_pool.evaluation.cases import TransferEnv
from marl_pool.evaluation.settings import TargetSettings, TransferSettings
from marl_pool.options.names import resolve, trust
from marl_pool.options.signatures import options_of
from marl_pool.options.types import Kernels
from marl_pool.policies.base import Policy, SpecifiedPolicy
from marl_pool.policies.random_policy import RandomPolicy
from marl_pool.policies.storage import load_modules
from marl_pool.pooling.attention_neuron import AttentionNeuronPooling
from marl_pool.utils.devices import without_denormals
from marl_pool.utils.errors import InputError, StoppedError, described
from marl_pool.utils.randomness import EVALUATION_ENVS
from marl_pool.version import __version__, commit

if TYPE_CHECKING:
    from marl_pool.runs.run import Run

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
        plugins: ``package.module:Class`` names that ``env`` may use; None for an
            environment that the user chose, rather than a file.
        checkpoint: ``"best"``, ``"last"`` or the number of an iteration; empty for
            policies that come from no run.
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

    @classmethod
    def from_run(
        cls,
        run: "Run",
        settings: TargetSettings,
        *,
        env: Mapping[str, Any] | None = None,
        plugins: Collection[str] = (),
    ) -> "EvaluationTarget":
        """Load the policies of a run, with the checkpoint, seed and device of settings.

        ``env`` has the complete options of the environments; None for the run's own.
        ``plugins`` are the ``package.module:Class`` names that the run may use.

        Raises:
            InputError: no such policy or device, or a policy that does not fit the
                environment.
        """
        validate_device(settings.device)
        env = dict(env or run.env)
        # Names in the run's files may only be those that the user allows.
        with trust(plugins, run.path, config=run.config):
            groups = describe_env(env).groups
            fixed = _fixed_groups(run, groups)
            # Scripted opponents come from the env's registry, not from the folder.
            scripted = {
                name: scripted_policy(
                    policy, env=env["name"], role=name, group=groups[name]
                )
                for name, policy in fixed.items()
                if is_scripted(policy)
            }
            # A single module that names no group plays all but the scripted ones.
            folder = run.policy_path(settings.checkpoint)
            modules, by_group = load_modules(folder, plugins=plugins)
            if not by_group and len(modules) == 1:
                by_group = {g: next(iter(modules)) for g in groups if g not in scripted}
            saved = {group: modules[module] for group, module in by_group.items()}
            policies: Policies = {**saved, **scripted}
            # Evaluate in float64, so that the order of tokens changes no action.
            target = cls(
                policies=to_float64(policies, settings.device),
                env=env,
                source=run.path.name,
                trained_env=dict(run.env),
                seed=settings.seed,
                device=settings.device,
                fixed=frozenset(fixed),
                plugins=frozenset(plugins),
                checkpoint=settings.checkpoint,
                iteration=run.iteration_of(settings.checkpoint),
                training={
                    "config_digest": run.config_digest,
                    "training_seed": run.config.get("seed"),
                },
            )
            target.validate_fit(str(run.config.get("policy_from", run.path)))
        return target

    @classmethod
    def from_policies(
        cls,
        policy: Policy | Act | Mapping[str, Policy | Act],
        env: Mapping[str, Any],
        *,
        name: str = "",
        seed: int = 0,
        device: str = "cpu",
        plugins: Collection[str] | None = None,
    ) -> "EvaluationTarget":
        """Wrap policies or functions of observations, by group or one for all.

        ``name`` is the `source`; the other arguments are attributes of a target.

        Raises:
            InputError: no such device, groups without a policy, or a policy that does
                not fit the environment.
        """
        validate_device(device)
        # The groups of the environment decide which policies are needed.
        bare = cls({}, dict(env), name, dict(env), seed, device)
        groups = bare.describe().groups
        # One policy plays all groups.
        group_policies = (
            policy if isinstance(policy, Mapping) else dict.fromkeys(groups, policy)
        )
        if set(group_policies) != set(groups):
            raise InputError(
                f"policy: expected one for each group {sorted(groups)}, "
                f"got {sorted(group_policies)}"
            )
        policies = dict[str, Policy]()
        for key, group in groups.items():
            candidate = group_policies[key]
            policies[key] = (
                candidate
                if isinstance(candidate, Policy)
                else CallablePolicy(candidate, group)
            )
        allowed = None if plugins is None else frozenset(plugins)
        target = replace(bare, policies=to_float64(policies, device), plugins=allowed)
        target.validate_fit("policy")
        return target

    @property
    def name(self) -> str:
        """The checkpoint, with its iteration where that adds something."""
        if self.iteration is None or self.iteration == self.checkpoint:
            return str(self.checkpoint)
        return f"{self.checkpoint} (iteration {self.iteration})"

    def title(self, episodes: int) -> str:
        """Return the title of a table of ``episodes`` episodes."""
        env = self.env["name"]
        return f"{self.source}: {env}, {episodes} episodes, checkpoint {self.name}"

    def validate_fit(self, source: str) -> None:
        """Raise `InputError` if the policies cannot act in the environment."""
        if reason := misfit(self.policies, self.describe().groups):
            raise InputError(
                f"{source} does not fit the env {self.env['name']}: {reason}"
            )

    def record(self, episodes: int) -> dict[str, Any]:
        """Return the entries that hold for all rows, each of ``episodes`` episodes."""
        # Name the options in which the environment differs from the training's.
        trained = self.trained_env
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
            "kernels": describe_kernels(self.device),
            **self.training,
        }

    def make_env(self, num_envs: int, first: int = 0, **changes: Any) -> BatchedEnv:
        """Make evaluation environments ``first`` to ``first + num_envs - 1``.

        They are not yet reset. The same numbers and seed give the same episodes.
        ``changes`` are options of the env that differ.
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

    def _trusted(self) -> AbstractContextManager[None]:
        return nullcontext() if self.plugins is None else trust(self.plugins)

    def transfer_env(self, settings: TransferSettings, num_envs: int) -> TransferEnv:
        """Prepare other environments, in which the policies play unperturbed.

        An option that the env lacks, or tokens that the policies cannot take, are
        recorded as the reason why there are no numbers.

        Raises:
            InputError: a value that the env rejects.
        """
        # Find a reason why there can be no numbers, before building baselines.
        changes, policies = settings.env, self.policies
        baselines: dict[str, Policies] = {}
        parameters = options_of(resolve(self.env["name"], ENVS, "env", BatchedEnv))
        if missing_key := next((key for key in changes if key not in parameters), None):
            missing = f"env {self.env['name']} has no {missing_key}"
        else:
            description = self.describe(**changes)
            missing = misfit(policies, description.groups)
            # Simulators are too slow to play baselines in as well.
            if not missing and not description.simulated:
                baselines = self.baselines(**changes)
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
        ``changes`` are options of the env that differ.
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
    """Copy policies so that more tokens make no larger codes than in training.

    AttentionNeuron's codes are sums over tokens. They are multiplied by the number of
    tokens that the policy was made for over the number present (``expected_tokens``).
    Means, and other heads, are unchanged.

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
    """Return the reason why policies cannot act in an environment, or an empty string.

    Policies of groups that the environment lacks are ignored.
    """
    for name, group in groups.items():
        policy = policies.get(name)
        if policy is None:
            return f"expected a policy of {name!r}, got {', '.join(policies)}"
        if isinstance(policy, SpecifiedPolicy) and (
            reason := policy.mismatch(group.tokens, group.action_space)
        ):
            return f"the policy of {name!r}: {reason}"
    return ""


@contextmanager
def computing(
    threads: int | None,
    kernels: Kernels = "auto",
    env_timeout: float | None = None,
    device: str = "cpu",
) -> Iterator[None]:
    """Set torch's threads, the kernels and environments' time limit inside the block.

    Denormal numbers are 0 there; see `without_denormals`. Environments take over the
    processes of earlier ones; see `kept_workers`.

    None leaves the number of threads unchanged; see `use_kernels` for the kernels of a
    device, and `limit_calls` for the seconds of a call of an environment.

    Raises:
        InputError: there is no such kernel.
        StoppedError: a call of an environment exceeded the limit, or raised.
    """
    previous = torch.get_num_threads()
    torch.set_num_threads(threads or previous)
    try:
        with (
            use_kernels(kernels, device),
            without_denormals(),
            limit_calls(env_timeout),
            kept_workers(),
        ):
            yield
    except EnvTimeoutError as error:
        raise StoppedError(str(error)) from error
    except InputError:
        raise
    except Exception as error:
        # An environment is the user's; whatever else fails is our own bug.
        if not (call := raised_by(error)):
            raise
        raise StoppedError(f"{described(error)}, raised by {call}") from error
    finally:
        torch.set_num_threads(previous)


def validate_device(device: str) -> None:
    """Raise `InputError` if a device is absent or cannot compute in float64."""
    try:
        torch.empty(1, dtype=torch.float64, device=device)
    except (RuntimeError, TypeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise InputError(
            f"device: expected one that is available and computes in float64, "
            f"got {device!r}: {reason}"
        ) from error


def _fixed_groups(run: "Run", groups: Collection[str]) -> dict[str, str]:
    fixed = run.config.get("fixed") or {}
    if (
        not isinstance(fixed, Mapping)
        or not all(isinstance(name, str) for name in fixed.values())
        or not set(fixed) < set(groups)
    ):
        raise InputError(
            f"{run.path}/config.yaml: fixed: expected names of policies for some, not "
            f"all of the groups {', '.join(groups)}, got {fixed!r:.80}"
        )
    return dict(fixed)
