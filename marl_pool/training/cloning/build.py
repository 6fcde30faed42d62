"""Building the teacher, the student and the policies of the other groups."""

from collections.abc import Mapping
from pathlib import Path

from torch.utils._pytree import tree_leaves

from marl_pool.envs.base import AgentGroup
from marl_pool.envs.scripted import HEURISTIC, scripted_policy
from marl_pool.networks import seeded
from marl_pool.policies import AGENTS
from marl_pool.policies.agent import Agent
from marl_pool.policies.base import SpecifiedPolicy
from marl_pool.policies.storage import WEIGHTS, load_modules
from marl_pool.training.cloning.collect import Roles
from marl_pool.training.cloning.settings import CloneConfig
from marl_pool.training.cloning.teacher import PolicyTeacher, PrivilegedTeacher, Teacher
from marl_pool.training.fixed_policies import (
    build_fixed,
    load_fixed,
    load_frozen,
    validate_fit,
)
from marl_pool.utils.construction import build
from marl_pool.utils.errors import InputError
from marl_pool.utils.names import is_plug_in

VALUE_TABLE = "value_table"
NAMED = (
    f"{HEURISTIC}, {VALUE_TABLE}, package.module:Class or the folder of a policy or run"
)


def cloned_group(config: CloneConfig, groups: Mapping[str, AgentGroup]) -> str:
    """Return the one group that is not in ``fixed``.

    Raises:
        InputError: there is none, or more than one.
    """
    fixed = config.fixed or {}
    for name in fixed:
        if name not in groups:
            raise InputError(
                f"fixed: expected groups among {', '.join(groups)}, got {name!r}"
            )
    left = [name for name in groups if name not in fixed]
    if len(left) != 1:
        raise InputError(
            f"fixed: expected all groups but one, that is cloned, got "
            f"{', '.join(fixed) or 'none'} of {', '.join(groups)}"
        )
    return left[0]


def build_roles(
    config: CloneConfig,
    groups: Mapping[str, AgentGroup],
    kept: Path,
    saved: Path | None,
) -> Roles:
    """Build the teacher and the policies of the other groups.

    Args:
        config: configuration of the run.
        groups: all groups of the environment.
        kept: folder of the run's copy of its teacher, read if it exists.
        saved: policy folder of a checkpoint, which holds the other groups' policies.

    Raises:
        InputError: no such policy, or one that does not fit its group.
    """
    group = cloned_group(config, groups)
    env_name = config.env["name"]
    fixed = load_fixed(
        config.fixed, groups, env=env_name, plugins=config.plugins, saved=saved
    )
    others = {
        name: build_fixed(what, env_name, name, groups[name]).to(config.device)
        for name, what in fixed.items()
    }
    teacher = None
    if config.teacher is not None:
        try:
            teacher = _teacher(config, config.teacher, group, groups[group], kept)
        except InputError as error:
            raise InputError(f"teacher: {error}") from error
    return Roles(group, teacher, others)


def _teacher(
    config: CloneConfig, what: str, group: str, own: AgentGroup, kept: Path
) -> Teacher:
    env_name = config.env["name"]
    if what == VALUE_TABLE:
        return _value_table(env_name)
    if what == HEURISTIC or is_plug_in(what):
        policy = scripted_policy(what, env=env_name, role=group, group=own)
    else:
        policy = _load(config, what, group, own, kept)
    return PolicyTeacher(policy.to(config.device).eval(), what)


def _value_table(env_name: str) -> Teacher:
    if env_name != "pong":
        raise InputError(f"expected env=pong with {VALUE_TABLE}, got env={env_name}")
    # Import here: the console needs an extra.
    from marl_pool.envs.pong.teacher import ValueTableTeacher

    return PrivilegedTeacher(ValueTableTeacher(), VALUE_TABLE)


def _load(
    config: CloneConfig, what: str, name: str, group: AgentGroup, kept: Path
) -> SpecifiedPolicy:
    """Read the teacher, preferably the run's own copy: folders move and change."""
    if (kept / WEIGHTS).is_file():
        return next(iter(load_modules(kept, plugins=config.plugins)[0].values()))
    path = Path(what).expanduser()
    if not path.is_dir():
        raise InputError(f"expected {NAMED}, got {what!r}")
    policy = load_frozen(path, name, config.plugins)
    validate_fit(policy, group, str(path))
    return policy


def make_student(config: CloneConfig, group: AgentGroup) -> Agent:
    """Build the agent that learns.

    Raises:
        InputError: an invalid option, or a class that is not an `Agent`.
    """
    options = dict(config.policy)
    context = {
        "spec": group.tokens,
        "action_space": group.action_space,
        "seed": config.seed,
    }
    name = options.pop("name")
    with seeded(config.seed, "student"):  # a class of one's own may take no seed
        student: Agent = build(name, AGENTS, "policy", Agent, options, context)
    return student.to(config.device)


def has_memory(student: Agent, num_tokens: int) -> bool:
    """Test for a recurrent student, which learns from sequences, not single steps."""
    return bool(tree_leaves(student.initial_memory(1, num_tokens)))
