"""What the command line does for runs, as functions for policies from anywhere."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from marl_pool.errors import InputError
from marl_pool.evaluation.function import Act, as_policy
from marl_pool.evaluation.measure import Measured, measure
from marl_pool.evaluation.subject import Subject, cpu_threads, in_double, misfit
from marl_pool.policies.base import Policy


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
) -> Measured:
    """Measure how robust a policy is: one of ours, or any function.

    ``marl_pool.evaluate(lambda obs: model.predict(obs)[0], "simple_centroid")`` tests
    a model of Stable-Baselines3; see ``scripts/examples``. What `marl-pool evaluate`
    does for a run, this does for a policy from anywhere, in the same worlds.

    Args:
        policy: what acts; see `Function` for functions. By group where a world has
            several groups of agents; a single one plays them all.
        env: a registered name, or ``{"name": …, **options}``.
        suite: a name of ``configs/suite``, or ``{"perturbations": […], "worlds":
            […]}`` as in its files.
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

    Returns:
        Rows, each episode's returns, and one number for each perturbation.

    Raises:
        InputError: unknown names, wrong options, a policy that does not fit the env,
            a function that returns no actions of its space.
    """
    settings = _settings(suite, episodes, seed, config_dir)
    options = {"name": env} if isinstance(env, str) else dict(env)
    checked = _check_env(options)
    subject = _subject(policy, checked, seed, device)
    others = subject.others(settings["worlds"], episodes)
    with cpu_threads(1):
        measured = measure(
            subject.policies,
            lambda: subject.worlds(episodes),
            settings["perturbations"],
            others=others,
            baselines=subject.baselines(),
            stochastic=stochastic,
            seed=seed,
            workers=threads,
        )
    if title is not None:
        measured.show(title)
    if out is not None:
        from marl_pool.evaluation.results import Files
        from marl_pool.evaluation.robustness import about, write_measured

        folder = Path(out)
        folder.mkdir(parents=True, exist_ok=True)
        told = about(subject, episodes, run=title or folder.name)
        write_measured(Files(folder), measured, told, title or folder.name)
    return measured


def _settings(
    suite: str | Mapping[str, Any],
    episodes: int,
    seed: int,
    config_dir: str | Path | None,
) -> dict[str, Any]:
    """The suite, checked as the command line checks it."""
    from marl_pool.config import check, compose_only

    folder = None if config_dir is None else str(config_dir)
    named = suite if isinstance(suite, str) else "quick"
    composed, _ = compose_only("evaluate", [f"suite={named}"], folder)
    if not isinstance(suite, str):
        composed = {**composed, "perturbations": [], "worlds": [], **suite}
    return check("evaluate", {**composed, "episodes": episodes, "seed": seed})


def _check_env(options: Mapping[str, Any]) -> dict[str, Any]:
    from marl_pool.config.checks import check_change

    checked = check_change("env", options)
    assert checked is not None
    return checked


def _subject(
    policy: Policy | Act | Mapping[str, Policy | Act],
    env: Mapping[str, Any],
    seed: int,
    device: str,
) -> Subject:
    bare = Subject({}, dict(env), dict(env), seed, device, "", None)
    world = bare.worlds(1)
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
    return Subject(
        in_double(policies, device), dict(env), dict(env), seed, device, "", None
    )
