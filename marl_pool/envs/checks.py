"""The checks of ``marl-pool check-env``: does an environment keep its contract?

They play an environment several times, and compare what `marl_pool.envs.contract`,
which sees one step at a time, cannot: seeds, batches and saved states.
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
    validate_types,
)
from marl_pool.envs.pettingzoo.workers import kept_workers
from marl_pool.envs.timeout import EnvTimeoutError, env_call
from marl_pool.tokens import Tokens, TokenSpec
from marl_pool.utils.errors import InputError, UnfitTokensError, described

NUM_ENVS, STEPS, SEED = 3, 25, 11


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
        except InputError as error:
            findings[rule] = str(error)
        except Exception as error:  # whatever a user's environment raises
            findings[rule] = f"expected no error, got {described(error)}"
    return findings


Build = Callable[..., BatchedEnv]


def _expect(holds: bool, subject: str, expected: object, actual: object) -> None:
    if not holds:
        raise InputError(f"{subject}: expected {expected}, got {actual}")


def _expect_dtype(env: BatchedEnv, tokens: Tokens, subject: str) -> None:
    dtype = tokens.features.dtype
    if dtype.is_floating_point:
        _expect(dtype == env.dtype, subject, env.dtype, dtype)


def _expect_finite(numbers: Tensor, subject: str) -> None:
    finite = bool(numbers.isfinite().all())
    _expect(finite, subject, "finite numbers", "NaN or infinity")


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
        for name, tokens in checked_observation(env).items():
            validate_types(env, name, tokens, env.steps)
            _expect_dtype(env, tokens, f"{name}: features")
            _expect_finite(tokens.features[~tokens.padding], f"{name}: features")
        step = checked_step(env, _actions(env, number))
        env.reset(step.terminated | step.truncated)


def _check_state(build: Build) -> None:
    """Check the state, where an environment offers it."""
    env = build()
    env.reset()
    try:
        specs = checked_state_specs(env)
        if not specs and not env.overrides("observe_state"):
            return
    except UnfitTokensError:  # of a simulator, known only to itself
        return
    groups = f"some of the groups {', '.join(env.groups)}"
    _expect(bool(specs), "state_specs", groups, "none")
    for number in range(STEPS):
        for name, tokens in checked_state(env, specs).items():
            numbers = tokens.features[~tokens.padding]
            _expect_dtype(env, tokens, f"{name}: features of the state")
            _expect_finite(numbers, f"{name}: features of the state")
            count = specs[name].num_types
            wrong = ((tokens.types < 0) | (tokens.types >= count)) & ~tokens.padding
            subject = f"{name}: types of the state"
            _expect(not wrong.any(), subject, f"numbers below {count}", "others")
        step = checked_step(env, _actions(env, number))
        env.reset(step.terminated | step.truncated)


def _check_steps(build: Build) -> None:
    env = build()
    env.reset()
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
    env = build()
    env.reset()
    for number in range(STEPS):
        presence, steps = presence_of(env), env.steps.clone()
        step = checked_step(env, _actions(env, number))
        validate_presence(env, presence, step.rewards, first_steps=steps)
        env.reset(step.terminated | step.truncated)


def _check_seeds(build: Build) -> None:
    _same(_play(build()), _play(build()), "episodes of the same seed")
    env = build()
    env.reset()
    first = _seen(env)
    env.reset()
    equal = all(torch.equal(*pair) for pair in zip(first, _seen(env), strict=True))
    # Many games have one start.
    _expect(
        not equal or env.turn_based,
        "two episodes of a seed",
        "different starts",
        "equal ones",
    )


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
    env, specs = build(), dict[str, TokenSpec]()
    env.reset()
    with suppress(InputError):  # another rule's
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
        _same([parts], [copies], f"{subject} before and after later steps")


def _check_order(build: Build) -> None:
    """Check that the order of the groups in the actions does not matter."""
    subject = "steps whose actions name the groups in another order"
    _same(_play(build()), _play(build(), order=-1), subject)


RULES: dict[str, Callable[[Build], None]] = {
    "groups are declared": _check_groups,
    "observations have the declared shapes, dtypes and types": _check_observations,
    "a state, where there is one, has its shapes, dtypes and types": _check_state,
    "rewards and ends have their shapes and dtypes, and are finite": _check_steps,
    "some agents are alive, and the others neither act nor earn": _check_presence,
    "a seed determines the episodes": _check_seeds,
    "an environment plays the same episode alone and in a batch": _check_batch,
    "a saved state continues exactly": _check_saved_state,
    "later steps change neither an observation nor a state": _check_kept,
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
    for number, rows in enumerate(zip(first, second, strict=True), start=1):
        for a, b in zip(*rows, strict=True):
            same = (a == b) | (a.isnan() & b.isnan())
            _expect(
                bool(same.all()),
                subject,
                "equal tensors",
                f"others after step {number}",
            )
