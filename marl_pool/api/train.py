"""Train a new run by PPO from Python, as ``marl-pool train`` does."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from marl_pool.utils.errors import InputError, StoppedError, explain_missing_modules
from marl_pool.utils.paths import user_path
from marl_pool.utils.text import print_line

if TYPE_CHECKING:
    from marl_pool.options.overrides import Override
    from marl_pool.runs.run import Run
    from marl_pool.training.settings import RunConfig

OnIteration = Callable[["Run", dict[str, float]], Any]
"""Takes the run and the last row of its metrics; a true result stops training."""


def train(
    *overrides: str,
    run_dir: str | Path | None = None,
    config_dir: str | Path | None = None,
    on_iteration: OnIteration | None = None,
    **options: Any,
) -> "Run":
    """Train a new run by PPO in this process, and return it.

    ``train("experiment=simple_centroid", pooling="max", run_dir="runs/max")`` is
    ``marl-pool train experiment=simple_centroid pooling=max --run-dir runs/max``: the
    same checks, random numbers and files. Needs the extra ``rllib``.

    Example::

        run = train(
            "experiment=simple_centroid",
            pooling={"name": "ada", "query": "mean"},
            ppo={"lr": 1e-3},
            total_steps=100_000,
            run_dir="runs/mean-query",
        )
        policy = load_policy(run.policy_dir)

    Args:
        *overrides: ``group=option`` and ``key=value``, as on the command line.
        run_dir: folder of the run; None chooses a new one in ``runs/``.
        config_dir: a folder with your YAML files.
        on_iteration: called as ``on_iteration(run, row)`` after each iteration with its
            row of ``metrics.csv``; True saves the run and ends it. An exception ends it
            too, and the newest checkpoint remains.
        **options: the same as keyword arguments, read after ``overrides``. A mapping
            sets the keys of a section, and its ``name`` chooses the option of a group.
            Pass dotted keys as ``**{"ppo.lr": 1e-3}``.

    Returns:
        The finished run: `Run.path`, `Run.policy_dir`, `Run.rows`.

    Raises:
        InputError: an unknown key, a value of a wrong type or range, a folder that is
            not empty, or a missing extra.
        StoppedError: training failed; the newest checkpoint remains in the run.
    """
    from marl_pool.options.signatures import check_argument  # loads pydantic

    for text in overrides:
        check_argument("overrides", text, str)
    check_argument("run_dir", run_dir, str | Path | None)
    check_argument("config_dir", config_dir, str | Path | None)
    check_argument("on_iteration", on_iteration, Callable[..., Any] | None)
    with explain_missing_modules():
        from marl_pool.options.overrides import overrides_of

        typed: list[str | Override] = [*overrides, *overrides_of(options)]
        config = compose_run("train", typed, config_dir)
        config = fitted(config, typed, config_dir)
        with new_run(config, run_dir) as run:
            from marl_pool.evaluation.computing import computing
            from marl_pool.training.jobs import perform
            from marl_pool.utils.randomness import restored_randomness

            stop = on_iteration and _after_each_row(run, on_iteration)
            options = {"should_stop": stop} if stop else {}
            # Restore the threads, generators and modes of torch, which training sets.
            with computing(None), restored_randomness():
                problem = perform(run, config, **options)
    if problem:
        print_line(problem)
    return run


def compose_run(
    verb: str, overrides: "Sequence[str | Override]", config_dir: str | Path | None
) -> "RunConfig":
    """Compose and check the configuration of one run.

    Raises:
        InputError: the configuration is wrong, or it is a grid of several runs.
    """
    from marl_pool.config import STUDIES, check, compose_only, naming_files

    # A preset may turn out to be a grid.
    composed = compose_only(verb, overrides, config_dir)
    if verb in STUDIES and "grid" in composed:
        command = f"marl-pool {STUDIES[verb]}"
        raise InputError(f"grid: a grid is many runs; use `{command}`")
    with naming_files(verb, overrides, config_dir):
        return check(verb, composed, overrides)


def fitted(
    config: "RunConfig",
    overrides: "Sequence[str | Override]",
    config_dir: str | Path | None,
) -> "RunConfig":
    """Round up a batch size that the user did not set, and print it (`fit_batch`)."""
    from marl_pool.config import fit_batch

    fit, lines = fit_batch(config.verb, config, overrides, config_dir)
    for line in lines:
        print_line(line)
    return fit


@contextmanager
def new_run(config: "RunConfig", path: str | Path | None) -> Iterator["Run"]:
    """Create a run's folder; discard it if the block fails before it wrote anything.

    Args:
        config: composed and checked configuration.
        path: the folder; None chooses a new one in ``runs/``.
    """
    from marl_pool.runs.mirrored import validate_new
    from marl_pool.runs.run import Run, default_path
    from marl_pool.training.callbacks import callback_classes
    from marl_pool.training.jobs import validate_ray_for

    validate_ray_for(config)
    callback_classes(config.callbacks)
    folder = user_path(path or default_path(config.plain))
    validate_new(folder, config.storage)
    is_first = not folder.parent.exists()
    run = Run.create(folder, config.plain, config.verb)
    try:
        yield run
    except StoppedError:
        raise  # the checkpoints remain
    except BaseException:  # Ctrl-C and SIGTERM too
        run.discard_if_unused()
        if is_first:
            with suppress(OSError):  # it has other files
                folder.parent.rmdir()
        raise


def _after_each_row(run: "Run", on_iteration: OnIteration) -> Callable[[], bool]:
    """Turn a callback into a ``should_stop`` that calls it once for each row."""
    from marl_pool.runs.metrics import ITERATION  # loads yaml

    last_iteration = 0.0

    def should_stop() -> bool:
        nonlocal last_iteration
        # The loop also asks before the first row, and again after the last one.
        row = run.metrics.last
        if row.get(ITERATION, 0) <= last_iteration:
            return False
        last_iteration = row[ITERATION]
        return bool(on_iteration(run, dict(row)))

    return should_stop
