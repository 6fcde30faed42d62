"""The runs of a report: their comparable evaluations and diagnoses, their policies."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any

import pandas as pd

from marl_pool.evaluation.comparable import validate_comparable
from marl_pool.evaluation.loading import EvaluationTarget
from marl_pool.evaluation.report.diagnoses import Diagnosed, diagnosis_of
from marl_pool.evaluation.report.evaluations import (
    AS_TRAINED,
    Evaluation,
    evaluation_of,
)
from marl_pool.evaluation.report.folders import short_folders
from marl_pool.evaluation.settings import TargetSettings
from marl_pool.runs import Run
from marl_pool.utils.errors import InputError
from marl_pool.utils.progress import Progress

BEST = "best"
Protocol = Mapping[str, Any]
Loaded = Mapping[Path, EvaluationTarget | str]
"""The policies of each run by its folder, or the reason why they cannot be loaded."""


@dataclass(frozen=True)
class ReportedRun:
    """A run and what a report shows of it.

    Attributes:
        run: its folder.
        name: the end of its path that tells it apart from the other runs.
        evaluation: its complete evaluations; None without a comparable one.
        evaluation_missing: the reason why there is none.
        diagnosis: the newest; None without a comparable one.
        diagnosis_missing: the reason why there is none; empty if none was made.
    """

    run: Run
    name: str
    evaluation: Evaluation | None = None
    evaluation_missing: str = ""
    diagnosis: Diagnosed | None = None
    diagnosis_missing: str = ""

    @property
    def seed(self) -> int | None:
        """The seed of the training."""
        return self.run.config.get("seed")

    @property
    def metrics(self) -> pd.DataFrame:
        """``metrics.csv``; without rows if it cannot be read."""
        return self._metrics[0]

    @property
    def metrics_missing(self) -> str:
        """The reason to leave out ``metrics.csv``; empty if it is intact or missing."""
        return self._metrics[1]

    @cached_property
    def _metrics(self) -> tuple[pd.DataFrame, str]:
        try:
            rows = pd.DataFrame(self.run.rows(), dtype=float)
        except (OSError, ValueError, TypeError, AttributeError):
            # In a line of more fields than the header a list takes a number's place.
            return pd.DataFrame(), "metrics.csv holds what is no number"
        # A wrong number is found by the checksum alone.
        problem = self.run.metrics_problem()
        return (pd.DataFrame() if problem else rows), problem

    def relative(self, path: Path) -> str:
        """A file of the run, without the folders above the run."""
        return f"{self.name}/{path.relative_to(self.run.path).as_posix()}"

    def without_folders(self, message: object) -> str:
        """A message about the run, without the folders above the run."""
        text = str(message)
        for path in (self.run.path.resolve(), self.run.path):
            text = text.replace(str(path), self.name) if path.is_absolute() else text
        for folder, name in short_folders([self.run.config]).items():
            text = text.replace(folder, name)
        return text


def read_runs(runs: Sequence[Run]) -> list[ReportedRun]:
    """Read the evaluation and the diagnosis of each run.

    Those made by another protocol than most are left out, with the reason: their
    numbers cannot be compared.

    Args:
        runs: at least one.

    Raises:
        InputError: runs that cannot be compared, or one that is given twice.
    """
    validate_envs(runs)
    validate_comparable(runs)
    evaluations = [evaluation_of(run) for run in runs]
    diagnoses = [diagnosis_of(run) for run in runs]
    usual = _usual([one for one in evaluations if isinstance(one, Evaluation)])
    reference = usual or _usual(
        [one for one in diagnoses if isinstance(one, Diagnosed)]
    )
    found = []
    for run, name, evaluation, diagnosis in zip(
        runs, _names(runs), evaluations, diagnoses, strict=True
    ):
        no_evaluation = _evaluation_problem(name, evaluation, usual)
        kept = None if no_evaluation else evaluation
        assert not isinstance(kept, str)
        no_diagnosis = _diagnosis_problem(name, diagnosis, kept, reference)
        known = None if no_diagnosis or isinstance(diagnosis, str) else diagnosis
        found.append(ReportedRun(run, name, kept, no_evaluation, known, no_diagnosis))
    return found


def not_evaluated(runs: Sequence[Run]) -> list[Run]:
    """The runs without a comparable evaluation.

    Raises:
        InputError: as `read_runs`.
    """
    return [one.run for one in read_runs(runs) if one.evaluation is None]


def validate_envs(runs: Sequence[Run]) -> None:
    """Reject configurations that are not of this package.

    Raises:
        InputError: a run whose configuration names no environment.
    """
    for run in runs:
        _ = run.env


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


def _names(runs: Sequence[Run]) -> list[str]:
    """The shortest ends of the runs' paths that are all different."""
    parts = [run.path.resolve().parts for run in runs]
    names = (["/".join(own[-depth:]) for own in parts] for depth in count(1))
    return next(own for own in names if len(set(own)) == len(runs))


def _usual(found: Sequence[Evaluation | Diagnosed]) -> Protocol:
    """The most frequent protocol, the first one of equally frequent ones."""
    protocols = {repr(one.protocol): one.protocol for one in found}
    most = Counter(repr(one.protocol) for one in found).most_common(1)
    return protocols[most[0][0]] if most else {}


def _evaluation_problem(name: str, own: Evaluation | str, usual: Protocol) -> str:
    if isinstance(own, str):
        return f"{own}: {_command('evaluate', name, usual)}"
    differs = _differences(own.protocol, usual)
    reason = f"its evaluation cannot be compared with the others: {differs}"
    return reason if differs else ""


def _diagnosis_problem(
    name: str, own: Diagnosed | str, evaluation: Evaluation | None, usual: Protocol
) -> str:
    if not own:
        return ""
    if isinstance(own, str):
        return f"{own}; make another: {_command('diagnose', name, usual)}"
    differs = _differences(own.protocol, usual)
    if not differs and evaluation is not None:
        own_iteration, its = (
            own.about.get("iteration"),
            evaluation.about.get("iteration"),
        )
        differs = _differences(
            {"iteration": own_iteration}, {"iteration": its}, "its evaluation has"
        )
    reason = f"its diagnosis cannot be compared with the other numbers: {differs}"
    return reason if differs else ""


def _differences(own: Protocol, usual: Protocol, has: str = "the others have") -> str:
    """The settings that differ, in words; empty if none does."""
    return ", ".join(
        f"{key} {own[key]} where {has} {usual[key]}"
        for key in own
        if own[key] != usual[key]
    )


def _command(verb: str, name: str, usual: Protocol) -> str:
    """The command that makes what is missing, by the usual protocol."""
    env, checkpoint = usual.get("env", AS_TRAINED), usual.get("checkpoint", BEST)
    # A diagnosis has other numbers of episodes, and codes of its own.
    keys = ("episodes", "seed") if verb == "evaluate" else ("seed",)
    words = [f"{key}={usual[key]}" for key in keys if key in usual]
    words += [f"checkpoint={checkpoint}"] if checkpoint != BEST else []
    if usual.get("rescale_codes") and verb == "evaluate":
        words.append("rescale_codes=true")
    if env != AS_TRAINED:
        words += [f"env.{key}={value}" for key, value in env.items()]
    return " ".join(["marl-pool", verb, name, *words])
