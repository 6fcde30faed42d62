"""Saved or scripted policies of groups that do not learn, and initial policies."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from marl_pool.envs.base import AgentGroup
from marl_pool.envs.scripted import is_scripted, scripted_policy
from marl_pool.files.hub import is_hub
from marl_pool.options.names import nearest
from marl_pool.policies.base import Policy, SpecifiedPolicy
from marl_pool.policies.storage import CONFIG, load_modules
from marl_pool.pretrained import PREFIX, pretrained_names, pretrained_path
from marl_pool.runs.run import CONFIG as RUN_CONFIG
from marl_pool.runs.run import Run
from marl_pool.utils.errors import InputError
from marl_pool.utils.paths import user_path

Fixed = dict[str, str | SpecifiedPolicy]
"""Fixed group → name of a scripted policy, or a frozen policy."""


def frozen_module(group: str) -> str:
    """Return the name under which a run saves a group's frozen policy."""
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
                continue
            # Resume with the run's own copy, as the source may have moved or changed.
            # There is none if the group was scripted before.
            copies = {} if saved is None else load_modules(saved, plugins=plugins)[0]
            if copy := copies.get(frozen_module(name)):
                policies[name] = copy.requires_grad_(False)
            else:
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
    """Build a scripted policy in evaluation mode; return a frozen one unchanged."""
    if isinstance(policy, SpecifiedPolicy):
        return policy
    return scripted_policy(policy, env=env, role=role, group=group).eval()


def load_saved(
    source: str, group: str, plugins: Sequence[str], alternatives: str = ""
) -> SpecifiedPolicy:
    """Read a group's policy, with parameters that require no gradient.

    If a folder has only one policy, it is taken for any group.

    Args:
        source: folder of a policy or run, ``pretrained=NAME`` or ``hf://…``.
        group: name of the group.
        plugins: ``package.module:Class`` names that the folder may use.
        alternatives: for messages, what else is accepted.

    Raises:
        InputError: no such folder, or no policy for this group in it.
    """
    folder: str | Path = source if is_hub(source) else user_path(source)
    if source.startswith(PREFIX):
        folder = pretrained_path(source.removeprefix(PREFIX))
    elif Path(folder, RUN_CONFIG).is_file():
        folder = Run.open(folder).policy_path("best")
    elif not is_hub(source) and not Path(folder, CONFIG).is_file():
        shipped = [f"{PREFIX}{name}" for name in pretrained_names()]
        near = nearest(Path(source).name, [*alternatives.split(", ")[:-1], *shipped])
        hint = f". Did you mean {near!r}?" if near else ""
        raise InputError(
            f"expected {alternatives}{PREFIX}NAME or the folder of a policy or run, "
            f"got {source!r}{hint}"
        )
    modules, groups = load_modules(folder, plugins=plugins)
    if group not in groups and len(modules) > 1:
        raise InputError(
            f"{source} has no policy for this group, only for "
            f"{', '.join(map(repr, groups)) or 'none'}"
        )
    policy = modules[groups.get(group, next(iter(modules)))]
    return policy.requires_grad_(False)


def validate_fit(policy: SpecifiedPolicy, group: AgentGroup, path: str) -> None:
    """Reject a policy whose tokens or actions differ from the group's.

    The number of tokens may differ from training if the pooling head allows it.

    Raises:
        InputError: the policy does not fit.
    """
    reason = policy.mismatch(group.tokens, group.action_space)
    if reason:
        raise InputError(f"{path} does not fit the group: {reason}")
    with torch.no_grad():
        policy.value(group.tokens.zeros(1))
