"""Robustness evaluation of policies of any origin, from Python."""

import threading
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from marl_pool.envs.pettingzoo.gymnasium_ids import EnvFactory, env_options
from marl_pool.evaluation.callable_policy import Act, Predictor
from marl_pool.evaluation.evaluate import evaluate_target, write_results
from marl_pool.evaluation.load import target_from_policies
from marl_pool.evaluation.measure import EvaluationResults
from marl_pool.evaluation.results import Files
from marl_pool.evaluation.settings import EvaluateSettings
from marl_pool.files.atomic import make_folder, removed_if_empty
from marl_pool.options.names import texts_in, trust, unknown
from marl_pool.options.overrides import plain
from marl_pool.options.signatures import check_argument
from marl_pool.policies.base import Policy
from marl_pool.utils.errors import InputError, explain_os_errors
from marl_pool.utils.paths import user_path

SUITE_KEYS = ("perturbations", "transfer")
"""Keys of a suite that is given as a mapping."""


def evaluate(
    policy: Policy | Act | Predictor | Mapping[str, Policy | Act | Predictor],
    env: str | EnvFactory | Mapping[str, Any],
    *,
    suite: str | Mapping[str, Any] = "quick",
    episodes: int = 256,
    stochastic: bool = False,
    worst_of: int = 1,
    seed: int = 0,
    device: str = "cpu",
    threads: int = 2,
    env_timeout: float | None = None,
    config_dir: str | Path | None = None,
    title: str | None = None,
    out: str | Path | None = None,
    plugins: Iterable[str] = (),
) -> EvaluationResults:
    """Measure the robustness of a policy: one of this package, or any model.

    ``marl_pool.evaluate(model, "CartPole-v1")`` evaluates a model of
    Stable-Baselines3, which receives perturbed observations of its own space; see
    ``examples/``. A perturbation that the space cannot express gives a row with the
    reason. ``marl-pool evaluate``, which evaluates a run, plays the same episodes.

    Args:
        policy: policy, function of observations or object with ``predict`` (see
            `CallablePolicy`), or a mapping from groups of agents to these. A single one
            plays all groups.
        env: a registered name, a Gymnasium id, or a function that creates a Gymnasium
            or PettingZoo environment; with options, ``{"name": …, **options}``. The
            options of ``{"name": "pettingzoo", "module": …}``, whose module is an id or
            a function, say how observations become tokens.
        suite: a name of ``configs/suite``, or ``{"perturbations": […], "transfer":
            […]}`` as in its files. A suite's analyses are made only for runs.
        episodes: episodes for each severity of a perturbation. Episode i starts in the
            same state in all of them.
        stochastic: measure sampled actions in addition to the most likely ones. A
            function decides by itself and is called in the same way for both.
        worst_of: samples of each perturbation under which every episode is played.
            Above 1, `Result.worst` is the mean of the lowest returns.
        seed: seed of the episodes, which never occur in training.
        device: device of environments, and of policies of this package.
        threads: number of threads, each of which plays one case at a time.
        env_timeout: seconds that one step or reset of all environments may take, or
            None for no limit. With a limit one thread, the main one, plays all cases.
        config_dir: a folder with your ``suite/NAME.yaml``.
        title: title of the table on screen and of the plot; None prints no table.
        out: folder for the same files as in a run's ``evaluation/``; None writes none.
        plugins: classes outside the package, ``package.module:Class``, that a suite
            read from a file may name. A suite that is a mapping may name any.

    Returns:
        Rows, each episode's returns, and for each perturbation the area under the
        score over severity.

    Raises:
        InputError: unknown names, wrong options, a policy that does not fit the env,
            or a function whose actions are not in their space.
        StoppedError: an environment exceeded ``env_timeout``.
    """
    from marl_pool.config.checks import check_section
    from marl_pool.config.sections import GROUPS

    check_argument("config_dir", config_dir, str | Path | None)
    check_argument("title", title, str | None)
    check_argument("out", out, str | Path | None)
    in_main_thread = threading.current_thread() is threading.main_thread()
    if env_timeout is not None and not in_main_thread:
        raise InputError(
            "env_timeout: expected None outside the main thread, since signals "
            f"interrupt only that, got {env_timeout}"
        )
    # A suite from a file may name only classes that the user allows.
    from_file = isinstance(suite, str)
    with trust(plugins, f"the suite {suite!r}") if from_file else nullcontext():
        settings = _settings(
            suite,
            config_dir,
            episodes=episodes,
            stochastic=stochastic,
            worst_of=worst_of,
            seed=seed,
            device=device,
            threads=threads,
            env_timeout=env_timeout,
        )
    folder = None if out is None else user_path(out)
    name = title or (folder.name if folder else "")
    options = env_options(env)
    # Transfer environments in a file may not import what the user did not name.
    allowed = {*plugins, *texts_in(options)} if from_file else None
    options = check_section("env", options, GROUPS["env"])
    # The settings hold plain numbers, where the arguments may be numpy's.
    episodes, worst_of = settings.episodes, settings.worst_of
    target = target_from_policies(
        policy,
        options,
        name=name,
        seed=settings.seed,
        device=settings.device,
        plugins=allowed,
    )
    transfers = [
        target.transfer_env(change, episodes) for change in settings.transfer_settings
    ]
    with nullcontext() if folder is None else removed_if_empty(folder):
        if folder is not None:
            # Create the folder before the episodes are played, which may take hours.
            with explain_os_errors(f"out: {folder} cannot be made"):
                make_folder(folder)
        results = evaluate_target(target, settings, transfers)
        if title is not None:
            results.show(title)
        if folder is not None:
            record = target.record(episodes) | {"worst_of": worst_of}
            write_results(Files(folder), results, record, name)
    return results


def _settings(
    suite: str | Mapping[str, Any], config_dir: str | Path | None, **arguments: Any
) -> EvaluateSettings:
    """Compose the suite, and check it with the arguments as the command line does."""
    from marl_pool.config import check_plain, compose_only

    if not isinstance(suite, str | Mapping):
        raise InputError(
            f"suite: expected a name or a mapping, got {type(suite).__name__}"
        )
    # A mapping replaces the rows of any named suite.
    base = suite if isinstance(suite, str) else "quick"
    config = compose_only("evaluate", [f"suite={base}"], config_dir)
    if not isinstance(suite, str):
        for key in suite:
            if key not in SUITE_KEYS:
                raise unknown("key of a suite", str(key), SUITE_KEYS)
        config = {**config, **{key: [] for key in SUITE_KEYS}, **suite}
    settings = {key: plain(key, value) for key, value in arguments.items()}
    checked = check_plain("evaluate", {**config, **settings})
    return EvaluateSettings.from_config(checked)
