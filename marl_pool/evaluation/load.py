"""Loading of evaluation targets: policies of a run, or of any origin."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from marl_pool.envs.description import describe_env
from marl_pool.envs.scripted import is_scripted, scripted_policy
from marl_pool.evaluation.callable_policy import Act, CallablePolicy, Predictor
from marl_pool.evaluation.settings import TargetSettings
from marl_pool.evaluation.target import EvaluationTarget, Policies, to_float64
from marl_pool.files.hub import is_hub
from marl_pool.options.names import trust
from marl_pool.policies.base import Policy
from marl_pool.policies.storage import load_modules
from marl_pool.utils.errors import InputError, first_line
from marl_pool.utils.text import print_line

if TYPE_CHECKING:
    from marl_pool.runs.run import Run


def target_from_run(
    run: "Run",
    settings: TargetSettings,
    *,
    env: Mapping[str, Any] | None = None,
    plugins: Collection[str] = (),
) -> EvaluationTarget:
    """Load the policies of a run, with the checkpoint, seed and device of settings.

    ``env`` has all options of the environments, by default those in the run.
    ``plugins`` are the ``package.module:Class`` names that the run may use.

    Raises:
        InputError: no such policy or device, or a policy that does not fit the
            environment.
    """
    validate_device(settings.device)
    if change := run.config_change():
        print_line(f"{change}: results may be attributed to another configuration")
    env = dict(env or run.env)
    origin = run.config.get("policy_from")
    # The run's files may only name classes that the user allows.
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
        # A single module without a group plays all groups but the scripted ones.
        folder = run.policy_path(settings.checkpoint)
        modules, by_group = load_modules(folder, plugins=plugins)
        if not by_group and len(modules) == 1:
            by_group = {g: next(iter(modules)) for g in groups if g not in scripted}
        saved = {group: modules[module] for group, module in by_group.items()}
        policies: Policies = {**saved, **scripted}
        # Evaluate in float64, so that the order of tokens changes no action.
        target = EvaluationTarget(
            policies=to_float64(policies, settings.device),
            env=env,
            source=run.name,
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
                # The name on the hub has the commit; local folders are not recorded.
                **({"policy_from": origin} if is_hub(origin) else {}),
            },
        )
        target.validate_fit(str(origin or run.path))
    return target


def target_from_policies(
    policy: Policy | Act | Predictor | Mapping[str, Policy | Act | Predictor],
    env: Mapping[str, Any],
    *,
    name: str = "",
    seed: int = 0,
    device: str = "cpu",
    plugins: Collection[str] | None = None,
) -> EvaluationTarget:
    """Wrap policies or functions of observations, one for all groups or by group.

    ``name`` is the target's ``source``; the other arguments are its attributes.

    Raises:
        InputError: no such device, groups without a policy, or a policy that does
            not fit the environment.
    """
    validate_device(device)
    # The groups of the environment decide which policies are needed.
    bare = EvaluationTarget({}, dict(env), name, dict(env), seed, device)
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


def validate_device(device: str) -> None:
    """Raise `InputError` if a device is absent or cannot compute in float64."""
    try:
        torch.empty(1, dtype=torch.float64, device=device)
    except (RuntimeError, TypeError, AssertionError) as error:
        reason = first_line(error)
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
