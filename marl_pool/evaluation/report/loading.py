"""The policies of the runs, loaded for attention and videos."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from marl_pool.evaluation.loading import EvaluationTarget
from marl_pool.evaluation.report.runs import ReportedRun
from marl_pool.evaluation.settings import TargetSettings
from marl_pool.utils.errors import InputError
from marl_pool.utils.progress import Progress

Loaded = Mapping[Path, EvaluationTarget | str]
"""The policies of each run by its folder, or the reason why they cannot be loaded."""


def load_policies(runs: Sequence[ReportedRun], plugins: Collection[str]) -> Loaded:
    """Load the policies of all runs."""
    loaded = {}
    with Progress(len(runs), unit="runs") as progress:
        for done, one in enumerate(runs, start=1):
            loaded[one.run.path] = load(one, plugins)
            progress.update(done)
    return loaded


def load(one: ReportedRun, plugins: Collection[str]) -> EvaluationTarget | str:
    """Load the evaluated policies of a run; without an evaluation, the best ones."""
    about = {} if one.evaluation is None else one.evaluation.about
    try:
        return EvaluationTarget.from_run(
            one.run,
            TargetSettings.from_config(
                {key: about[key] for key in ("checkpoint", "seed") if about}
            ),
            env=about["env"] if about and about["changed"] else None,
            rescale_codes=about["rescale_codes"] if about else False,
            plugins=plugins,
        )
    except InputError as error:
        return one.without_folders(error)


def trained_groups(subject: EvaluationTarget) -> list[str]:
    """The groups of agents whose policies were trained."""
    return [name for name in subject.policies if name not in subject.fixed]


def load_problem(subject: EvaluationTarget | str, group: str) -> str:
    """The reason to leave out the policy of a group; empty if there is none."""
    if isinstance(subject, str):
        return subject
    if group not in trained_groups(subject):
        return f"the group {group!r} did not learn in this run"
    return ""
