"""Groups of agents that do not learn: scripted ones, and frozen policies."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from marl_pool.envs.base import AgentGroup
from marl_pool.envs.scripted import is_scripted, scripted_policy
from marl_pool.policies.base import Policy, SpecifiedPolicy
from marl_pool.policies.storage import CONFIG, load_modules
from marl_pool.runs import CONFIG as RUN_CONFIG
from marl_pool.runs import Run
from marl_pool.tokens import Tokens
from marl_pool.utils.errors import InputError

Fixed = dict[str, str | SpecifiedPolicy]
"""Policy of each fixed group: the name of a scripted policy, or a frozen one."""


def with_absolute_folders(fixed: Mapping[str, str] | None) -> dict[str, str] | None:
    """Turn folders into absolute paths: a run may be resumed from elsewhere."""
    if fixed is None:
        return None
    return {
        group: name if is_scripted(name) else str(Path(name).expanduser().absolute())
        for group, name in fixed.items()
    }


def frozen_module(group: str) -> str:
    """The name under which a group's frozen policy is saved with the run."""
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
        fixed: group → name of a scripted policy, or a folder; None: no group is fixed.
        groups: of the environment, those of ``fixed`` among them.
        env: name of the environment.
        plugins: ``package.module:Class`` names that the folders may use.
        saved: a policy folder of this run. Its frozen policies are taken: the folders
            that they came from may have moved, or hold others by now.

    Raises:
        InputError: no such policy, or one that does not fit its group.
    """
    found: Fixed = {}
    for name, what in (fixed or {}).items():
        try:
            if is_scripted(what):
                build_fixed(what, env, name, groups[name])
                found[name] = what
            elif saved is not None:
                modules, _ = load_modules(saved, plugins=plugins)
                found[name] = modules[frozen_module(name)].requires_grad_(False)
            else:
                policy = load_frozen(Path(what), name, plugins)
                check_fit(policy, groups[name], what)
                found[name] = policy
        except InputError as error:
            raise InputError(f"fixed.{name}: {error}") from error
    return found


def build_fixed(
    what: str | SpecifiedPolicy, env: str, role: str, group: AgentGroup
) -> Policy:
    """The policy of a fixed group, in evaluation mode."""
    if isinstance(what, SpecifiedPolicy):
        return what
    return scripted_policy(what, env=env, role=role, group=group).eval()


def load_frozen(path: Path, group: str, plugins: Sequence[str]) -> SpecifiedPolicy:
    """Read a group's policy, or the only one, from the folder of a policy or run.

    Raises:
        InputError: no such folder, or no policy for this group in it.
    """
    if (path / CONFIG).is_file():
        folder = path
    elif (path / RUN_CONFIG).is_file():
        folder = Run.open(path).policy_path("best")
    else:
        raise InputError(
            f"{path} is no folder of a policy or a run; choose heuristic, random, "
            "package.module:Class or such a folder"
        )
    modules, groups = load_modules(folder, plugins=plugins)
    if group not in groups and len(modules) > 1:
        raise InputError(
            f"{path} has no policy for this group, only for "
            f"{', '.join(sorted(groups)) or 'none'}"
        )
    policy = modules[groups.get(group, next(iter(modules)))]
    return policy.requires_grad_(False)


def check_fit(policy: SpecifiedPolicy, group: AgentGroup, path: str) -> None:
    """Refuse a policy that cannot read what the group sees or act as it does.

    The number of tokens may differ from what it was trained on, if its head allows.

    Raises:
        InputError: it does not fit.
    """
    spec = group.tokens
    reason = policy.mismatch(spec, group.action_space)
    if reason:
        raise InputError(f"{path} does not fit the group: {reason}")
    dtype = getattr(torch, spec.dtype)
    tokens = Tokens(
        torch.zeros(1, spec.num_tokens, spec.num_features, dtype=dtype),
        torch.zeros(1, spec.num_tokens, dtype=torch.int64),
        torch.zeros(1, spec.num_tokens, dtype=torch.bool),
    )
    with torch.no_grad():
        policy.value(tokens)
