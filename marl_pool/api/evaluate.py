"""What the command line does for runs, as functions for policies from anywhere."""

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from marl_pool.evaluation.callable_policy import Act, as_policy
from marl_pool.evaluation.loading import (
    EvaluationTarget,
    check_device,
    cpu_threads,
    misfit,
    to_float64,
)
from marl_pool.evaluation.measure import Measured, measure
from marl_pool.evaluation.results import Files
from marl_pool.evaluation.run import about, write_measured
from marl_pool.policies.base import Policy
from marl_pool.utils.atomic import make_folder
from marl_pool.utils.errors import InputError
from marl_pool.utils.names import texts_in, trust, unknown

SUITE = ("perturbations", "worlds")
"""What a suite of one's own may say."""


def evaluate(
    policy: Policy | Act | Mapping[str, Policy | Act],
    env: str | Mapping[str, Any],
    *,
    suite: str | Mapping[str, Any] = "quick",
    episodes: int = 256,
    stochastic: bool = False,
    seed: int = 0,
    device: str = "cpu",
    threads: int = 2,
    config_dir: str | Path | None = None,
    title: str | None = None,
    out: str | Path | None = None,
    plugins: Iterable[str] = (),
) -> Measured:
    """Measure how robust a policy is: one of ours, or any function.

    ``marl_pool.evaluate(lambda obs: model.predict(obs)[0], "simple_centroid")`` tests
    a model of Stable-Baselines3; see ``examples/``. What `marl-pool evaluate`
    does for a run, this does for a policy from anywhere, in the same worlds.

    Args:
        policy: what acts; see `Function` for functions. By group where a world has
            several groups of agents; a single one plays them all.
        env: a registered name, or ``{"name": …, **options}``.
        suite: a name of ``configs/suite``, or ``{"perturbations": […], "worlds":
            […]}`` as in its files. Analyses, which some suites have too, are made of
            runs only.
        episodes: for each perturbation and severity, in as many paired worlds.
        stochastic: measure sampled actions beside the most likely ones; a function
            does as it likes in both.
        seed: of the worlds, which training never meets.
        device: where worlds, and policies of ours, live.
        threads: of torch; each plays another case.
        config_dir: a folder with ``suite/NAME.yaml`` of your own.
        title: of the table on screen and of the picture; None for no table.
        out: a folder that gets the same files as a run's ``evaluation/``; None for
            none.
        plugins: ``package.module:Class`` names that the file of ``suite`` may use. A
            suite that is a mapping is yours, and may name any.

    Returns:
        Rows, each episode's returns, and one number for each perturbation.

    Raises:
        InputError: unknown names, wrong options, a policy that does not fit the env,
            a function that returns no actions of its space.
    """
    given: dict[str, Any] = {
        "episodes": episodes,
        "stochastic": stochastic,
        "seed": seed,
        "device": device,
        "threads": threads,
    }
    own = not isinstance(suite, str)
    with nullcontext() if own else trust(plugins, f"the suite {suite!r}"):
        settings = _settings(suite, config_dir, **given)
    check_device(device)
    files = None if out is None else Files(_folder(out))
    subject = _subject(policy, _env(env), seed, device)
    if not own:  # its other environments may not import what the user did not name
        named = frozenset({*plugins, *texts_in(env)})
        subject = replace(subject, plugins=named)
    others = subject.others(settings["worlds"], episodes)
    with cpu_threads(1):
        measured = measure(
            subject.policies,
            lambda: subject.make_env(episodes),
            settings["perturbations"],
            others=others,
            baselines=subject.baselines(),
            stochastic=stochastic,
            seed=seed,
            workers=threads,
        )
    if title is not None:
        measured.show(title)
    if files is not None:
        name = title or files.folder.name
        write_measured(files, measured, about(subject, episodes, run=name), name)
    return measured


def _settings(
    suite: str | Mapping[str, Any], config_dir: str | Path | None, **given: Any
) -> dict[str, Any]:
    """All of it, checked as the command line checks it."""
    from marl_pool.config import check, compose_only

    if not isinstance(suite, str | Mapping):
        raise InputError(
            f"suite: expected a name or a mapping, got {type(suite).__name__}"
        )
    folder = None if config_dir is None else str(config_dir)
    named = suite if isinstance(suite, str) else "quick"
    composed, _ = compose_only("evaluate", [f"suite={named}"], folder)
    if not isinstance(suite, str):
        for key in suite:
            if key not in SUITE:
                raise unknown("key of a suite", str(key), SUITE)
        composed = {**composed, **{key_0: [] for key_0 in SUITE}, **suite}
    return check("evaluate", {**composed, **given})


def _env(env: str | Mapping[str, Any]) -> dict[str, Any]:
    from marl_pool.config.checks import check_section
    from marl_pool.config.sections import GROUPS

    given = {"name": env} if isinstance(env, str) else env
    return check_section("env", given, GROUPS["env"])


def _folder(out: str | Path) -> Path:
    """Made before anything is played, which may take hours."""
    folder = Path(out)
    try:
        make_folder(folder)
    except OSError as error:
        raise InputError(f"out: {folder} cannot be made: {error.strerror}") from error
    return folder


def _subject(
    policy: Policy | Act | Mapping[str, Policy | Act],
    env: Mapping[str, Any],
    seed: int,
    device: str,
) -> EvaluationTarget:
    bare = EvaluationTarget({}, dict(env), dict(env), seed, device, "", None)
    world = bare.make_env(1)
    given = policy
    if not isinstance(policy, Mapping):
        given = dict.fromkeys(world.groups, policy)
    assert isinstance(given, Mapping)
    if set(given) != set(world.groups):
        raise InputError(
            f"policy: expected one for each group {sorted(world.groups)}, "
            f"got {sorted(given)}"
        )
    policies = {
        name: as_policy(given[name], group) for name, group in world.groups.items()
    }
    reason = misfit(policies, world)
    if reason:
        raise InputError(f"policy does not fit the env {env['name']}: {reason}")
    return replace(bare, policies=to_float64(policies, device))
