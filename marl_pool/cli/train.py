"""Verbs that create runs, and the one that resumes them."""

import difflib
import shlex
import tempfile
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from marl_pool.api.train import compose_run, fitted, new_run
from marl_pool.cli import common
from marl_pool.files.hub import is_hub
from marl_pool.options.names import allowed, plug_ins_in, trust
from marl_pool.options.overrides import Override, is_among
from marl_pool.utils.errors import InputError, validate_module
from marl_pool.utils.text import print_line, print_note, quoted

if TYPE_CHECKING:
    from marl_pool.runs.run import Run
    from marl_pool.runs.sweep import Sweep
    from marl_pool.training.settings import RunConfig
    from marl_pool.training.sweep.plan import Plan

UNFINISHED = 75
"""Exit status of ``--or-resume`` if a time limit ended the run, as in sysexits.h."""


def train(arguments: Namespace, overrides: list[str]) -> int:
    """Train a new run; in the dry run of a fit, only estimate its cost."""
    typed = [*overrides, *common.flags_as_keys(arguments)]
    config = compose_run(arguments.verb, typed, arguments.config_dir)
    if arguments.cfg:
        common.print_config(arguments.verb, config.plain, arguments.config_dir)
        return 0
    config = fitted(config, typed, arguments.config_dir)
    from marl_pool.training.supervised.settings import FitConfig

    if isinstance(config, FitConfig) and arguments.dry_run:
        from marl_pool.training.supervised.fit import price

        with tempfile.TemporaryDirectory() as folder:
            print(price(config, Path(folder)))
        return 0
    or_resume = arguments.or_resume
    if or_resume:
        from marl_pool.training.jobs import begun, has_ended

        if arguments.run_dir is None:
            raise InputError(
                "--or-resume: expected --run-dir DIR, the folder of the run"
            )
        if run_to_resume := begun(Path(arguments.run_dir), config):
            is_over = has_ended(run_to_resume, config)
            status = _continue(run_to_resume, config, is_over)
            return status or _unfinished(run_to_resume, config)
    with new_run(config, arguments.run_dir) as run:
        status = _run_training(run, config)
        return status or (_unfinished(run, config) if or_resume else 0)


def sweep(arguments: Namespace, overrides: list[str]) -> int:
    """Run every trial of a grid or search; in a dry run, estimate their cost."""
    overrides += common.flags_as_keys(arguments)
    from marl_pool import config
    from marl_pool.runs.sweep import default_path

    # Compose and check all trials, so that a mistake in any of them shows at once.
    verb, folder = arguments.trained_by, arguments.config_dir
    make_plan = config.plan_search if arguments.search else config.plan_sweep
    plan = make_plan(overrides, folder, verb)
    if arguments.search:
        validate_module("optuna")
    # Print the first trial, since a key without a default may be swept, and the others'
    # values.
    if arguments.cfg:
        study = config.STUDIES[verb]
        values = plan.examples[0].values.items()
        first = [Override(key, [value]) for key, value in values]
        composed = config.compose_only(study, [*plan.overrides, *first], folder)
        checked = config.check_plain(study, {**composed, "grid": plan.grid})
        common.print_config(study, checked, folder)
        for key, (kind, *limits) in (plan.space or {}).items():
            print(f"# searched: {key}={kind}({','.join(map(str, limits))})")
        return 0
    if arguments.or_resume and arguments.sweep_dir is None:
        raise InputError("--or-resume: expected --sweep-dir DIR, the sweep's folder")
    from marl_pool.training.sweep.folder import begin_sweep

    path = arguments.sweep_dir or default_path(plan.examples[0].config.plain)
    flags = {"or_resume": arguments.or_resume, "dry_run": arguments.dry_run}
    return _run_sweep(begin_sweep(path, plan, folder, **flags), plan, **flags)


def _run_sweep(
    sweep: "Sweep", plan: "Plan", *, dry_run: bool = False, or_resume: bool = False
) -> int:
    from marl_pool.runs.sweep import TRIALS
    from marl_pool.training.sweep.plan import is_done, prepared

    with prepared(sweep, plan, dry_run):
        validate_module("ray")
        from marl_pool.training.sweep.run import run_sweep

        # Run the trials, until all have ended or Ctrl-C stops them.
        try:
            failed = run_sweep(sweep, plan, dry_run)
        except KeyboardInterrupt as error:
            if not sweep.is_at(sweep.path):
                raise
            configs = (trial.config.plain for trial in plan.trials)
            return common.stopped(error, sweep.path, *configs)
    # Report the results and the failures.
    if not dry_run:
        common.print_paths([sweep.path, sweep.table_path])
    for name, reason in failed.items():
        print_line(f"{name} failed: {reason}")
    if _mirror_status(sweep.mirror.problem if sweep.mirror else "") or failed:
        return 1
    if dry_run:
        return 0
    path = quoted(sweep.path)
    configs = (trial.config.plain for trial in plan.trials)
    flags = common.plugin_flags(set().union(*map(plug_ins_in, configs)))
    # A fit has no policy to evaluate.
    reads = ("evaluate", "report") if sweep.verb == "train" else ()
    common.print_next(
        f"marl-pool ls {path}",
        *(f"marl-pool {verb} {path}/{TRIALS}/*{flags}" for verb in reads),
    )
    return 0 if not or_resume or is_done(sweep, plan) else UNFINISHED


def resume(arguments: Namespace, overrides: list[str]) -> int:
    """Resume a run or a sweep."""
    from marl_pool.runs.sweep import Sweep
    from marl_pool.utils.text import is_url

    if is_url(arguments.run or "") and not is_hub(arguments.run):
        from marl_pool.runs.mirrored import restore_from

        # Mirror the run to where it comes from.
        url = arguments.run.rstrip("/")
        arguments.run, storage = str(restore_from(url)), url.rpartition("/")[0]
        overrides = [*overrides, common.as_key("storage", storage)]
    flags = (f"--plugin {shlex.quote(name)}" for name in arguments.plugin)
    command = ["marl-pool resume", shlex.quote(str(arguments.run)), *flags]
    with common.reading(arguments, overrides, " ".join(command)):
        if arguments.run is None or not Sweep.is_at(arguments.run):
            return _resume_run(arguments, overrides)
        with trust(allowed(), arguments.run):
            return _resume_sweep(Sweep.open(arguments.run), overrides)


def _resume_run(arguments: Namespace, overrides: list[str]) -> int:
    from marl_pool.config import assign, check
    from marl_pool.runs.run import CONFIG
    from marl_pool.training.jobs import JOBS, is_finished

    # Find what trained the run.
    run = common.open_run(arguments.verb, arguments.run)
    if run.verb not in JOBS:
        raise InputError(f"{run.path}: made by {run.verb!r}, which cannot be resumed")
    job = JOBS[run.verb]
    _validate_keys(job.controls, overrides)
    with trust(allowed(), run.path, config=run.config):
        with common.naming_file(run.path / CONFIG):
            # Complete a configuration from an earlier version, since `Job` reads it.
            complete = check(run.verb, run.config).plain
            _validate_same_network(run.config, complete)
        run.config = complete
        config = check(run.verb, assign(run.config, overrides))
        # A raised limit adds training, also to a run that a callback ended.
        return _continue(run, config, is_finished(run, config))


def _continue(run: "Run", config: "RunConfig", is_over: bool) -> int:
    """Continue a run from its newest checkpoint, unless it is over."""
    from marl_pool.training.jobs import JOBS, is_finished, validate_ray_for

    if is_over:
        run.recover()
        job = JOBS[run.verb]
        amount = f"{job.saved(run):,} of {job.total(config):,} {job.unit}"
        cause = "" if is_finished(run, config) else ", and a callback ended the run"
        print(f"{run.path}: {amount} are done{cause}; nothing to do")
        # Upload what its mirror lacks.
        if config.storage is None:
            return 0
        from marl_pool.runs.mirrored import mirrored

        with run.lock(), mirrored(run, config.storage) as mirror:
            pass
        return _mirror_status(mirror.problem if mirror else "")
    validate_ray_for(config)
    return _run_training(run, config)


def _mirror_status(problem: str) -> int:
    """Report what a mirror lacks, and return the exit status."""
    if problem:
        print_line(problem)
    return 1 if problem else 0


def _validate_same_network(
    stored: Mapping[str, Any], complete: Mapping[str, Any]
) -> None:
    """Reject a network with options that an earlier version did not have.

    The checkpoint's weights may still fit today's defaults, and training would silently
    continue with another network.
    """
    for section in ("policy", "encoder", "pooling"):
        old, new = stored.get(section), complete.get(section)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            for key in sorted(new.keys() - old.keys()):
                raise InputError(
                    f"{section}.{key}: expected the value that the run was begun with, "
                    "got none; another version of marl_pool, or an editor, wrote it. "
                    f"Today's default is {new[key]!r}: if that is right, write it into "
                    "config.yaml"
                )


def _resume_sweep(sweep: "Sweep", overrides: list[str]) -> int:
    from marl_pool.config import parse, plan_grid, plan_space
    from marl_pool.config.grid import reject_search_key, validate_free
    from marl_pool.training.jobs import JOBS

    _validate_keys((*JOBS[sweep.verb].controls, "sweep"), overrides)
    swept = {*sweep.grid, *(sweep.space or ())}
    for key in {parse(text).key for text in overrides} & swept:
        raise InputError(f"{key}: it is swept; for other values start a new sweep")
    validate_free(overrides)
    for text in overrides if sweep.space is None else ():
        reject_search_key(parse(text).key)
    sweep.overrides += overrides
    arguments = sweep.overrides, sweep.config_dir, sweep.verb
    if sweep.space is None:
        return _run_sweep(sweep, plan_grid(sweep.grid, *arguments))
    validate_module("optuna")
    return _run_sweep(sweep, plan_space(sweep.space, *arguments))


def _validate_keys(allowed: Sequence[str], overrides: Sequence[str]) -> None:
    """Reject keys that a resumed run or sweep can no longer change."""
    from marl_pool.config import parse

    for text in overrides:
        key = parse(text).key
        if not is_among(key, allowed):
            if near := difflib.get_close_matches(key, allowed, n=1):
                raise InputError(f"{key}: unknown key: did you mean {near[0]}?")
            raise InputError(
                f"{key}: a resumed run takes only {', '.join(allowed)}; "
                "for anything else start a new run"
            )


def _unfinished(run: "Run", config: "RunConfig") -> int:
    """Return the exit status that tells a job whether to try again."""
    from marl_pool.training.jobs import has_ended

    return 0 if has_ended(run, config) else UNFINISHED


def _run_training(run: "Run", config: "RunConfig") -> int:
    from marl_pool.training.jobs import JOBS, has_ended, perform

    job, began = JOBS[run.verb], time.monotonic()
    try:
        problem = perform(run, config)
    except KeyboardInterrupt as error:
        if run.is_unused:
            raise  # there is nothing to resume
        return common.stopped(error, run.path, config.plain)
    # A time limit ends a run early, and a resume continues it.
    if config.time_limit is not None and not has_ended(run, config):
        command = common.resume_command(run.path, config.plain)
        print_line(f"time_limit is over; resume with: {command}")
    # Print what exists: a fit has results in place of a policy.
    results = [run.path / job.result] if job.result else []
    paths = (run.metrics_path, run.policy_dir, *results)
    common.print_paths([run.path, *filter(Path.exists, paths)])
    from marl_pool.utils.progress import duration

    result = f"best checkpoint: {run.best}; " if run.best else ""
    print_note(f"{result}took {duration(time.monotonic() - began)}")
    common.print_next(*common.next_commands(run))
    return _mirror_status(problem)
