"""Checks of ``marl-pool check-env``, whether an environment keeps its contract.

They play an environment several times to compare seeds, batches and saved states, which
`marl_pool.envs.contract` cannot, since it sees one step at a time.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from marl_pool.envs import make_batched_env
from marl_pool.envs.base import BatchedEnv
from marl_pool.envs.contract import (
    checked_observation,
    checked_state,
    checked_state_specs,
    checked_step,
    presence_of,
    validate_presence,
    validate_state_names,
    validate_types,
)
from marl_pool.envs.pettingzoo.workers import kept_workers
from marl_pool.envs.timeout import EnvTimeoutError, env_call
from marl_pool.tokens import Tokens, TokenSpec
from marl_pool.utils.errors import InputError, UnfitTokensError, described

NUM_ENVS, STEPS, SEED = 3, 25, 11
SET_BY_CHECKS = ("num_envs", "seed", "first_env")
"""Arguments of an environment that the checks vary."""


@kept_workers()  # each rule builds environments
def check_env(name: str, **options: Any) -> dict[str, str]:
    """Check an environment against each of the `RULES` by playing a few steps.

    Example::

        problems = check_env("my_module:MyEnv", max_steps=50)
        assert not any(problems.values()), problems

    Args:
        name: a registered name or ``package.module:Class``.
        **options: of the environment.

    Returns:
        The problem with each rule, in one line; empty where the rule holds. A check
        that exceeds the limit of `limit_calls` is the last one, and its problem stands
        for all rules that remain.

    Raises:
        InputError: an unknown name or option, or one that the checks set.
    """
    for key in SET_BY_CHECKS:
        if key in options:
            raise InputError(
                f"env.{key}: expected none, since the checks set it, got {options[key]}"
            )

    def build(num_envs: int = NUM_ENVS, **extra: Any) -> BatchedEnv:
        return make_batched_env(name, num_envs, seed=SEED, **options, **extra)

    env = build()  # an error here comes from the name or the options
    findings: dict[str, str] = {}
    for rule, check in RULES.items():
        try:
            with env_call(env, f"the check {rule!r}"):
                check(build)
            findings[rule] = ""
        except EnvTimeoutError as late:
            return findings | {
                unchecked: str(late) for unchecked in RULES if unchecked not in findings
            }
        except InputError as error:
            findings[rule] = str(error)
        except Exception as error:  # whatever a user's environment raises
            findings[rule] = f"expected no error, got {described(error)}"
    return findings


Build = Callable[..., BatchedEnv]


def _expect(holds: bool, subject: str, expected: object, actual: object) -> None:
    if not holds:
        raise InputError(f"{subject}: expected {expected}, got {actual}")


def _expect_finite(numbers: Tensor, subject: str) -> None:
    finite = bool(numbers.isfinite().all())
    _expect(finite, subject, "finite numbers", "NaN or infinity")


def _expect_features(env: BatchedEnv, tokens: Tokens, subject: str) -> None:
    dtype = tokens.features.dtype
    if dtype.is_floating_point:
        _expect(dtype == env.dtype, subject, env.dtype, dtype)
    _expect_finite(tokens.features[~tokens.padding], subject)


def _build_and_reset(build: Build) -> BatchedEnv:
    env = build()
    env.reset()
    return env


def _advance(env: BatchedEnv, number: int) -> None:
    """Take step ``number``, and begin the next episode where one has ended."""
    step = checked_step(env, _actions(env, number))
    env.reset(step.terminated | step.truncated)


def _check_groups(build: Build) -> None:
    """Check that a reset leaves the groups as `make_batched_env` checked them."""
    env = build()
    before = dict(env.groups)
    env.reset()
    _expect(env.groups == before, "groups after reset", before, env.groups)


def _check_observations(build: Build) -> None:
    env = _build_and_reset(build)
    for number in range(STEPS):
        for name, tokens in checked_observation(env).items():
            validate_types(env, name, tokens, env.steps)
            _expect_features(env, tokens, f"{name}: features")
        _advance(env, number)


def _check_state(build: Build) -> None:
    env = _build_and_reset(build)
    try:
        specs = checked_state_specs(env)
        if not specs and not env.overrides("observe_state"):
            return
    except UnfitTokensError:  # the simulator offers no state
        return
    groups = f"some of the groups {', '.join(env.groups)}"
    _expect(bool(specs), "state_specs", groups, "none")
    for number in range(STEPS):
        for name, tokens in checked_state(env, specs).items():
            _expect_features(env, tokens, f"{name}: features of the state")
            count = specs[name].num_types
            wrong = ((tokens.types < 0) | (tokens.types >= count)) & ~tokens.padding
            subject = f"{name}: types of the state"
            _expect(not wrong.any(), subject, f"numbers below {count}", "other numbers")
        _advance(env, number)


def _check_steps(build: Build) -> None:
    env = _build_and_reset(build)
    for number in range(STEPS):
        step = checked_step(env, _actions(env, number))
        for name, rewards in step.rewards.items():
            dtype, subject = rewards.dtype, f"{name}: dtype of rewards"
            _expect(dtype == env.dtype, subject, env.dtype, dtype)
            _expect_finite(rewards, f"{name}: rewards")
        over = step.terminated | step.truncated
        missed = (env.steps >= env.max_steps) & ~over
        _expect(not missed.any(), "truncated after max_steps", True, False)
        if over.all():
            return
        env.reset(over)


def _check_presence(build: Build) -> None:
    env = _build_and_reset(build)
    for number in range(STEPS):
        presence, steps = presence_of(env), env.steps.clone()
        step = checked_step(env, _actions(env, number))
        validate_presence(env, presence, step.rewards, first_steps=steps)
        env.reset(step.terminated | step.truncated)


def _check_seeds(build: Build) -> None:
    from marl_pool.envs.pettingzoo.env import PettingZooEnv

    _expect_equal(_play(build()), _play(build()), "episodes of the same seed")
    env = _build_and_reset(build)
    first = _observe(env)
    env.reset()
    equal = all(torch.equal(*pair) for pair in zip(first, _observe(env), strict=True))
    # Many board games, and mazes of other libraries, always start from one position.
    _expect(
        not equal or env.turn_based or isinstance(env, PettingZooEnv),
        "two episodes of a seed",
        "different starts",
        "equal ones",
    )


def _check_batch(build: Build) -> None:
    many = _play(build())
    alone = _play(build(1, first_env=1))
    from_batch = [[part[1:2] for part in row] for row in many]
    _expect_equal(from_batch, alone, "environment 1, in a batch and alone")


def _check_saved_state(build: Build) -> None:
    env, restored = _build_and_reset(build), _build_and_reset(build)
    validate_state_names(env)
    _play(env, 5, reset=False)
    restored.load_state_dict(env.state_dict())
    expected = _play(env, STEPS, reset=False)
    continued = _play(restored, STEPS, reset=False)
    _expect_equal(expected, continued, "continuations of a saved state")


def _check_unwritten(build: Build) -> None:
    env, specs = _build_and_reset(build), dict[str, TokenSpec]()
    with suppress(InputError):  # reported by `_check_state`
        specs = checked_state_specs(env)
    readers: dict[str, Callable[[], dict[str, Tokens]]] = {
        "an observation": lambda: checked_observation(env),
        "a state": lambda: checked_state(env, specs) if specs else {},
    }
    for subject, read in readers.items():
        by_group = read()
        parts = [part for tokens in by_group.values() for part in tokens.parts]
        copies = [part.clone() for part in parts]
        _play(env, 3, reset=False)
        _expect_equal([parts], [copies], f"{subject} before and after later steps")


def _check_order(build: Build) -> None:
    subject = "steps whose actions name the groups in another order"
    _expect_equal(_play(build()), _play(build(), order=-1), subject)


RULES: dict[str, Callable[[Build], None]] = {
    "groups are declared": _check_groups,
    "rewards and ends have their shapes and dtypes, and are finite": _check_steps,
    "observations have the declared shapes, dtypes and types": _check_observations,
    "a state, where there is one, has its shapes, dtypes and types": _check_state,
    "some agents are alive, and the others neither act nor earn": _check_presence,
    "a seed determines the episodes": _check_seeds,
    "an environment plays the same episode alone and in a batch": _check_batch,
    "a saved state continues exactly": _check_saved_state,
    "later steps change neither an observation nor a state": _check_unwritten,
    "the order of the groups does not matter": _check_order,
}
"""Check of each rule, given a function that builds the environment.

A wrong step breaks other rules as well, so steps are checked early.
"""


def _actions(env: BatchedEnv, step: int) -> dict[str, Tensor]:
    """Return allowed actions that vary with environment number, agent and step only."""
    actions = {}
    observed = checked_observation(env) if env.has_action_masks else {}
    for name, group in env.groups.items():
        spec = group.actions
        shape = (env.num_envs, group.num_agents, *spec.shape)
        place = torch.arange(torch.Size(shape[1:]).numel())
        wave = 7.0 * env.env_ids.cpu()[:, None] + 3.0 * place.double() + 1.3 * step
        wave = wave.sin().view(shape)
        # Choices come first; the numbers of a Box are in [-1, 1].
        row, count = (wave[..., None] if spec.discrete else wave), len(spec.sizes)
        sizes = torch.tensor(spec.sizes)
        choices = ((row[..., :count] + 1) / 2 * sizes).long().to(env.device)
        if name in observed and (mask := observed[name].action_mask) is not None:
            table = spec.table(mask, False)
            allowed = table.gather(-1, choices[..., None])[..., 0]
            choices = torch.where(allowed, choices, table.byte().argmax(-1))
        if spec.integral:
            actions[name] = choices.view(shape)
        else:
            numbers = row[..., count:].to(env.device, env.dtype)
            actions[name] = torch.cat([choices.to(env.dtype), numbers], -1)
    return actions


def _observe(env: BatchedEnv) -> list[Tensor]:
    """Return the tensors of an observation; arbitrary values of padding become 0."""
    return [
        part
        for tokens in checked_observation(env).values()
        for part in tokens._replace(
            features=tokens.features.masked_fill(tokens.padding[..., None], 0),
            types=tokens.types.masked_fill(tokens.padding, 0),
        ).parts
    ]


def _play(
    env: BatchedEnv, steps: int = STEPS, *, reset: bool = True, order: int = 1
) -> list[list[Tensor]]:
    """Return the tensors of observations, rewards and ``terminated`` of each step."""
    rows = []
    if reset:
        env.reset()
    for number in range(steps):
        actions = _actions(env, number)
        ordered = {name: actions[name] for name in [*actions][::order]}
        step = checked_step(env, ordered)
        rewards = (step.rewards[name] for name in env.groups)
        rows.append([*_observe(env), *rewards, step.terminated])
    return rows


def _expect_equal(first: Any, second: Any, subject: str) -> None:
    for number, rows in enumerate(zip(first, second, strict=True), start=1):
        for a, b in zip(*rows, strict=True):
            same = (a == b) | (a.isnan() & b.isnan())
            _expect(
                bool(same.all()),
                subject,
                "equal tensors",
                f"different ones after step {number}",
            )
