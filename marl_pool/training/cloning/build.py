"""Building the teacher, the student and the policies of the other groups."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from marl_pool.envs.base import AgentGroup
from marl_pool.envs.scripted import HEURISTIC, scripted_policy
from marl_pool.networks import seeded
from marl_pool.perturbations import PERTURBATIONS
from marl_pool.perturbations.actions import ActionPerturbation
from marl_pool.perturbations.base import Perturbation, validate_no_ramp
from marl_pool.policies import AGENTS
from marl_pool.policies.agent import Agent
from marl_pool.policies.base import Policy
from marl_pool.policies.storage import WEIGHTS, load_modules
from marl_pool.training.cloning.behaviour_policy import Roles
from marl_pool.training.cloning.learner import AuxiliaryHead
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
from marl_pool.utils.names import is_plug_in, resolve

VALUE_TABLE = "value_table"


def validate_config(config: CloneConfig) -> None:
    """Validate what no single section of the configuration can check.

    Raises:
        InputError: rounds beyond the last batch, no teacher where one is needed, or a
            perturbation of actions or one that hides all tokens.
    """
    settings, perturbation = config.clone, config.perturbation
    # The last round needs batches of its own.
    last = settings.round_start(settings.rounds)
    if config.total_batches <= last:
        raise InputError(
            f"total_batches: expected more than {last}, where the last of "
            f"clone.rounds = {settings.rounds} begins, got {config.total_batches}"
        )
    if config.teacher is None:
        raise InputError("teacher: expected a policy to clone, got null")
    if perturbation.name != "none" and _acts(perturbation.name):
        fitting = [name for name in PERTURBATIONS if not _acts(name)]
        raise InputError(
            f"perturbation: expected one of the tokens, {', '.join(fitting)}, since "
            f"nothing acts on samples, got {perturbation.name}"
        )
    validate_no_ramp(perturbation, "samples are learned from in any order")
    for key in ("onset", "end", "agents", "groups"):
        if given := perturbation.get(key):
            raise InputError(
                f"perturbation.{key}: expected the default, since samples are learned "
                f"from in any order, got {given}"
            )
    severity = perturbation.get("severity", 0.0)
    # A list is a range of severities; check its upper end.
    largest = severity[-1] if isinstance(severity, list) else severity
    # A severity of 1 would hide all tokens.
    if perturbation.name == "occlude" and largest >= 1:
        raise InputError(
            "perturbation.severity: expected a fraction of hidden tokens in [0, 1), "
            f"got {largest:g}"
        )


def _acts(name: str) -> bool:
    cls = resolve(name, PERTURBATIONS, "perturbation", Perturbation)
    return issubclass(cls, ActionPerturbation)


def cloned_group(config: CloneConfig, groups: Mapping[str, AgentGroup]) -> str:
    """Return the one group that is not in ``fixed``.

    Raises:
        InputError: there is none, or more than one.
    """
    fixed = config.fixed or {}
    if unknown := [name for name in fixed if name not in groups]:
        raise InputError(
            f"fixed: expected groups among {', '.join(groups)}, got {unknown[0]!r}"
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

    The folder ``kept`` holds the run's copy of its teacher, if it exists, and ``saved``
    the other groups' policies, in a checkpoint.

    Raises:
        InputError: no such policy, or one that does not fit its group.
    """
    # Build the policies that play the groups that are not cloned.
    group = cloned_group(config, groups)
    env_name = config.env.name
    fixed = load_fixed(
        config.fixed, groups, env=env_name, plugins=config.plugins, saved=saved
    )
    others = {
        name: build_fixed(what, env_name, name, groups[name]).to(config.device)
        for name, what in fixed.items()
    }
    assert config.teacher is not None
    try:
        teacher = _teacher(config, config.teacher, group, groups[group], kept)
    except InputError as error:
        raise InputError(f"teacher: {error}") from error
    return Roles(group, teacher, others)


def _teacher(
    config: CloneConfig, what: str, name: str, group: AgentGroup, kept: Path
) -> Teacher:
    env_name = config.env.name
    if what == VALUE_TABLE:
        if env_name != "pong":
            raise InputError(f"expected env=pong with {what}, got env={env_name}")
        # Import here: the console needs an extra.
        from marl_pool.envs.pong.teacher import ValueTableTeacher

        return PrivilegedTeacher(ValueTableTeacher())
    policy: Policy
    if what == HEURISTIC or is_plug_in(what):
        policy = scripted_policy(what, env=env_name, role=name, group=group)
    elif (kept / WEIGHTS).is_file():
        # Prefer the run's own copy: folders move and change.
        policy = next(iter(load_modules(kept, plugins=config.plugins)[0].values()))
    elif (path := Path(what).expanduser()).is_dir():
        policy = load_frozen(path, name, config.plugins)
        validate_fit(policy, group, str(path))
    else:
        raise InputError(
            f"expected {HEURISTIC}, {VALUE_TABLE}, package.module:Class or the folder "
            f"of a policy or run, got {what!r}"
        )
    return PolicyTeacher(policy.to(config.device).eval())


def make_student(config: CloneConfig, group: AgentGroup) -> Agent:
    """Build the agent that learns.

    Raises:
        InputError: an invalid option, or a class that is not an `Agent`.
    """
    seed, policy = config.seed, config.policy
    context = {"spec": group.tokens, "action_space": group.action_space, "seed": seed}
    # Seed the construction, too: a class of one's own may take no seed.
    with seeded(seed, "student"):
        student: Agent = build(
            policy.name, AGENTS, "policy", Agent, policy.arguments, context
        )
    return student.to(config.device)


def make_auxiliary_head(
    config: CloneConfig, student: Agent, targets: Sequence[str]
) -> AuxiliaryHead | None:
    """Build the head for the teacher's privileged targets, if the config asks.

    Raises:
        InputError: a student without a hidden layer, or a teacher without targets.
    """
    weight = config.clone.auxiliary
    # The head reads a hidden layer, and learns what the teacher knows.
    if not weight:
        return None
    if not student.hidden_dim:
        raise InputError(
            f"clone.auxiliary: expected 0 with policy={config.policy.name},"
            f" which exposes no hidden layer, got {weight:g}"
        )
    if not targets:
        raise InputError(
            f"clone.auxiliary: expected 0, because {config.teacher} has no privileged "
            f"targets, got {weight:g}"
        )
    head = AuxiliaryHead(student.hidden_dim, len(targets), config.seed)
    return head.to(config.device)
