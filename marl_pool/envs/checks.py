"""Comparison of an environment with the contract of `BatchedEnv`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from marl_pool.envs import make_batched_env
from marl_pool.envs.base import BatchedEnv
from marl_pool.envs.pettingzoo.workers import kept_workers
from marl_pool.envs.rules import (
    checked_observation,
    checked_step,
    presence_of,
    validate_lives,
    validate_types,
)
from marl_pool.envs.timeout import EnvTimeoutError, env_call
from marl_pool.tokens import Tokens
from marl_pool.utils.errors import InputError, described

NUM_ENVS, STEPS, SEED = 3, 25, 11


class BrokenContractError(Exception):
    """A broken rule: the expected and the actual value, in one line."""


@kept_workers()  # each rule builds environments
def check_env(name: str, **options: Any) -> dict[str, str]:
    """Play a few steps with random actions, and compare an environment with its rules.

    Example::

        problems = check_env("my_module:MyEnv", max_steps=50)
        assert not any(problems.values()), problems

    Args:
        name: a registered name or ``package.module:Class``.
        **options: of the environment.

    Returns:
        Each rule with its problem, in one line; empty where it holds. After a check
        that exceeds the limit of `limit_calls`, the problem of the others is the same.

    Raises:
        InputError: an unknown name or option.
    """

    def build(num_envs: int = NUM_ENVS, **extra: Any) -> BatchedEnv:
        return make_batched_env(name, num_envs, seed=SEED, **options, **extra)

    env = build()  # an error here is of the name or the options
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
        except BrokenContractError as broken:
            findings[rule] = str(broken)
        except InputError as error:
            findings[rule] = str(error)
        except Exception as error:  # whatever a user's environment raises
            findings[rule] = f"expected no error, got {described(error)}"
    return findings


Build = Callable[..., BatchedEnv]


def _expect(holds: bool, subject: str, expected: object, actual: object) -> None:
    if not holds:
        raise BrokenContractError(f"{subject}: expected {expected}, got {actual}")


def _check_groups(build: Build) -> None:
    """Check that the groups of `make_batched_env` stay."""
    env = build()
    before = dict(env.groups)
    env.reset()
    _expect(env.groups == before, "groups after reset", before, env.groups)


def _check_observations(build: Build) -> None:
    env = build()
    env.reset()
    for number in range(STEPS):
        observed = checked_observation(env)
        for name, tokens in observed.items():
            validate_types(env, name, tokens, env.steps)
            _check_features(name, tokens, env.dtype)
        step = checked_step(env, _actions(env, number))
        env.reset(step.terminated | step.truncated)


def _check_features(name: str, tokens: Tokens, dtype: torch.dtype) -> None:
    """Check the values, and the precision, of features of the right form."""
    kind = tokens.features.dtype
    if kind.is_floating_point:
        _expect(kind == dtype, f"{name}: features", dtype, kind)
    finite = bool(tokens.features[~tokens.padding].isfinite().all())
    _expect(finite, f"{name}: features", "finite numbers", "NaN or infinity")


def _check_steps(build: Build) -> None:
    env = build()
    env.reset()
    for number in range(STEPS):
        step = checked_step(env, _actions(env, number))
        for name, rewards in step.rewards.items():
            kind = rewards.dtype
            _expect(kind == env.dtype, f"{name}: dtype of rewards", env.dtype, kind)
            good = bool(rewards.isfinite().all())
            _expect(good, f"{name}: rewards", "finite numbers", "NaN or infinity")
        missed = (env.steps >= env.max_steps) & ~(step.terminated | step.truncated)
        _expect(not missed.any(), "truncated after max_steps", True, False)
        over = step.terminated | step.truncated
        if over.all():
            return
        env.reset(over)


def _check_lives(build: Build) -> None:
    env = build()
    env.reset()
    for number in range(STEPS):
        lives, steps = presence_of(env), env.steps.clone()
        step = checked_step(env, _actions(env, number))
        validate_lives(env, lives, step.rewards, first_steps=steps)
        env.reset(step.terminated | step.truncated)


def _check_seeds(build: Build) -> None:
    _same(_play(build()), _play(build()), "episodes of the same seed")
    env = build()
    env.reset()
    first = _seen(env)
    env.reset()
    differs = any(
        not torch.equal(*pair) for pair in zip(first, _seen(env), strict=True)
    )
    # Many games have one start.
    differs |= env.turn_based
    _expect(differs, "two episodes of a seed", "different starts", "equal ones")


def _check_batch(build: Build) -> None:
    many = _play(build())
    alone = _play(build(1, first_env=1))
    from_batch = [[part[1:2] for part in row] for row in many]
    _same(from_batch, alone, "environment 1, in a batch and alone")


def _check_saved_state(build: Build) -> None:
    env, restored = build(), build()
    env.reset()
    restored.reset()
    _play(env, 5, reset=False)
    restored.load_state_dict(env.state_dict())
    expected = _play(env, STEPS, reset=False)
    continued = _play(restored, STEPS, reset=False)
    _same(expected, continued, "continuations of a saved state")


def _check_kept(build: Build) -> None:
    env = build()
    env.reset()
    parts = [
        part for tokens in checked_observation(env).values() for part in tokens.parts
    ]
    copies = [part.clone() for part in parts]
    _play(env, 3, reset=False)
    _same([parts], [copies], "an observation before and after later steps")


def _check_order(build: Build) -> None:
    """Check that the order of the groups in the actions does not matter."""
    turned = _play(build(), order=-1)
    _same(
        _play(build()), turned, "steps whose actions name the groups in another order"
    )


RULES: dict[str, Callable[[Build], None]] = {
    "groups are declared": _check_groups,
    "observations have the declared shapes, dtypes and types": _check_observations,
    "rewards and ends have their shapes and dtypes, and are finite": _check_steps,
    "some agents are alive, and the others neither act nor earn": _check_lives,
    "a seed determines the episodes": _check_seeds,
    "an environment plays the same episode alone and in a batch": _check_batch,
    "a saved state continues exactly": _check_saved_state,
    "later steps do not change an observation": _check_kept,
    "the order of the groups does not matter": _check_order,
}
"""Check of each rule, given a function that builds the environment."""


def _actions(env: BatchedEnv, step: int) -> dict[str, Tensor]:
    """Return actions by environment number, agent and step, allowed by the masks."""
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


def _seen(env: BatchedEnv) -> list[Tensor]:
    """Return all tensors of an observation; features of padding are arbitrary."""
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
    """Return observations, rewards and ends, each ``(steps, num_envs, …)``."""
    rows = []
    if reset:
        env.reset()
    for number in range(steps):
        actions = _actions(env, number)
        ordered = {name: actions[name] for name in [*actions][::order]}
        step = checked_step(env, ordered)
        rewards = (step.rewards[name] for name in env.groups)
        rows.append([*_seen(env), *rewards, step.terminated])
    return rows


def _same(first: Any, second: Any, subject: str) -> None:
    for number, (first_parts, second_parts) in enumerate(
        zip(first, second, strict=True)
    ):
        for a, b in zip(first_parts, second_parts, strict=True):
            equal = a.shape == b.shape and bool(
                ((a == b) | (a.isnan() & b.isnan())).all()
            )
            _expect(equal, subject, "equal tensors", f"others after step {number + 1}")
