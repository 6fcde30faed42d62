"""Policies that a training reads: of groups that do not learn, and to start with."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from marl_pool.envs.base import AgentGroup
from marl_pool.envs.scripted import is_scripted, scripted_policy
from marl_pool.files.hub import is_hub
from marl_pool.policies.base import Policy, SpecifiedPolicy
from marl_pool.policies.storage import CONFIG, load_modules
from marl_pool.pretrained import PREFIX, pretrained_path
from marl_pool.runs.run import CONFIG as RUN_CONFIG
from marl_pool.runs.run import Run
from marl_pool.tokens import Tokens, TokenSpec
from marl_pool.utils.errors import InputError

Fixed = dict[str, str | SpecifiedPolicy]
"""Fixed group → name of a scripted policy, or a frozen policy."""


def frozen_module(group: str) -> str:
    """Return the name under which a group's frozen policy is saved with the run."""
    return f"frozen-{group}"


def load_fixed(
    fixed: Mapping[str, str] | None,
    groups: Mapping[str, AgentGroup],
    *,
    env: str,
    plugins: Sequence[str],
    saved: Path | None = None,
) -> Fixed:
    """Load the policy of each fixed group.

    Args:
        fixed: group → name of a scripted policy, or a folder; None if all groups learn.
        groups: groups of the environment, by name.
        env: name of the environment.
        plugins: ``package.module:Class`` names that the folders may use.
        saved: policy folder of this run to resume from; None for a new run.

    Raises:
        InputError: an unknown policy, or one that does not fit its group.
    """
    policies: Fixed = {}
    for name, source in (fixed or {}).items():
        try:
            if is_scripted(source):
                # Build it once to check its name; each runner builds its own.
                build_fixed(source, env, name, groups[name])
                policies[name] = source
            elif saved is not None:
                # Resume with the run's own copy: the source may have moved or changed.
                modules, _ = load_modules(saved, plugins=plugins)
                policies[name] = modules[frozen_module(name)].requires_grad_(False)
            else:
                # Load the policy of another run, and check that it fits this group.
                policy = load_saved(
                    source, name, plugins, "heuristic, random, package.module:Class, "
                )
                validate_fit(policy, groups[name], source)
                policies[name] = policy
        except InputError as error:
            raise InputError(f"fixed.{name}: {error}") from error
    return policies


def build_fixed(
    policy: str | SpecifiedPolicy, env: str, role: str, group: AgentGroup
) -> Policy:
    """Build a scripted policy by its name, in evaluation mode; return a frozen one."""
    if isinstance(policy, SpecifiedPolicy):
        return policy
    return scripted_policy(policy, env=env, role=role, group=group).eval()


def load_saved(
    source: str, group: str, plugins: Sequence[str], alternatives: str = ""
) -> SpecifiedPolicy:
    """Read a group's policy, whose parameters get no gradient.

    The only policy of a folder is taken whatever its group.

    Args:
        source: folder of a policy or run, ``pretrained=NAME`` or ``hf://…``.
        group: name of the group.
        plugins: ``package.module:Class`` names that the folder may use.
        alternatives: for messages, what else might have been given.

    Raises:
        InputError: no such folder, or no policy for this group in it.
    """
    # Find the policy's folder.
    folder: str | Path = source if is_hub(source) else os.path.expanduser(source)
    if source.startswith(PREFIX):
        folder = pretrained_path(source.removeprefix(PREFIX))
    elif Path(folder, RUN_CONFIG).is_file():
        folder = Run.open(folder).policy_path("best")
    elif not is_hub(source) and not Path(folder, CONFIG).is_file():
        raise InputError(
            f"expected {alternatives}{PREFIX}NAME or the folder of a policy or run, "
            f"got {source!r}"
        )
    modules, groups = load_modules(folder, plugins=plugins)
    # Without a policy for this group, a single policy is taken.
    if group not in groups and len(modules) > 1:
        raise InputError(
            f"{source} has no policy for this group, only for "
            f"{', '.join(sorted(groups)) or 'none'}"
        )
    policy = modules[groups.get(group, next(iter(modules)))]
    return policy.requires_grad_(False)


def validate_fit(policy: SpecifiedPolicy, group: AgentGroup, path: str) -> None:
    """Reject a policy whose tokens or actions differ from the group's.

    The number of tokens may differ from training, if its pooling head allows.

    Raises:
        InputError: the policy does not fit.
    """
    reason = policy.mismatch(group.tokens, group.action_space)
    if reason:
        raise InputError(f"{path} does not fit the group: {reason}")
    with torch.no_grad():
        policy.value(zero_tokens(group.tokens, 1))


def validate_same_parameters(
    saved: SpecifiedPolicy, policy: SpecifiedPolicy, source: str
) -> None:
    """Reject a policy whose parameters cannot be those of a run's policy.

    Raises:
        InputError: another class, other tokens or actions, or parameters of other names
            or shapes.
    """
    if type(saved) is not type(policy):
        raise InputError(
            f"expected a {type(policy).__name__}, {source} is a {type(saved).__name__}"
        )
    if reason := saved.mismatch(policy.spec, policy.actions):
        raise InputError(f"{source} does not fit the group: {reason}")
    shapes = {name: tuple(tensor.shape) for name, tensor in policy.named_parameters()}
    for name, tensor in saved.named_parameters():
        shape = shapes.pop(name, None)
        if shape != tuple(tensor.shape):
            raise InputError(
                f"{source} has another {name} than the run's policy: expected "
                f"{'none' if shape is None else shape}, got {tuple(tensor.shape)}"
            )
    if shapes:
        raise InputError(f"{source} has no {next(iter(shapes))}")


def zero_tokens(spec: TokenSpec, batch: int) -> Tokens:
    """Return ``batch`` sets of zeros, to try a policy."""
    shape = (batch, spec.num_tokens)
    return Tokens(
        torch.zeros(*shape, spec.num_features, dtype=getattr(torch, spec.dtype)),
        torch.zeros(shape, dtype=torch.int64),
        torch.zeros(shape, dtype=torch.bool),
    )
