"""What a report is made of: runs, and what of theirs may stand side by side."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any

from marl_pool.evaluation.comparable import require_comparable
from marl_pool.evaluation.report.diagnosed import Diagnosed, diagnosis_of
from marl_pool.evaluation.report.evaluations import (
    AS_TRAINED,
    Evaluation,
    evaluation_of,
)
from marl_pool.evaluation.report.folders import short_folders
from marl_pool.runs import Run

BEST = "best"
ENV = "env"


@dataclass(frozen=True)
class Source:
    """A run, and what there is to say of it.

    Attributes:
        run: the run.
        name: the end of its path: enough to tell it from the other runs.
        evaluation: what its complete ones hold; None if there is none that counts.
        gap: why there is none; empty where there is one.
        diagnosis: the newest; None if there is none that counts.
        diagnosis_gap: why there is none; empty where there is one, or none was made.
    """

    run: Run
    name: str
    evaluation: Evaluation | None = None
    gap: str = ""
    diagnosis: Diagnosed | None = None
    diagnosis_gap: str = ""

    @property
    def seed(self) -> int | None:
        """Of the training."""
        return self.run.config.get("seed")

    @property
    def learned(self) -> list[str]:
        """The groups of agents whose policies were trained and evaluated."""
        return [] if self.evaluation is None else self.evaluation.learned

    @property
    def metrics(self) -> list[dict[str, float]]:
        """The rows of its ``metrics.csv``; none if it cannot be read."""
        return self._logged[0]

    @property
    def metrics_gap(self) -> str:
        """Why ``metrics.csv`` cannot be read; empty if it can, or is not there."""
        return self._logged[1]

    @cached_property
    def _logged(self) -> tuple[list[dict[str, float]], str]:
        try:
            rows = self.run.rows()
        except (OSError, ValueError, TypeError, AttributeError):
            # A line of more fields than the header has a list where a number should be.
            return [], "metrics.csv holds what is no number"
        # A wrong number looks like a right one: only the checksum tells.
        problem = self.run.metrics_problem()
        return ([], problem) if problem else (rows, "")

    def where(self, path: Path) -> str:
        """A file of the run, as it may be told to others: without the folders above."""
        return f"{self.name}/{path.relative_to(self.run.path).as_posix()}"

    def told(self, reason: object) -> str:
        """What was said of the run, without the folders above it."""
        text = str(reason)
        for path in (self.run.path.resolve(), self.run.path):
            text = text.replace(str(path), self.name) if path.is_absolute() else text
        for folder, name in short_folders([self.run.config]).items():
            text = text.replace(folder, name)
        return text


def read_sources(runs: Sequence[Run]) -> list[Source]:
    """Find what each run offers.

    Runs whose evaluation was made in another way than most are left with a gap: their
    numbers must not stand beside the others'. So are diagnoses.

    Args:
        runs: at least one.

    Raises:
        InputError: runs that cannot be compared, or one that is given twice.
    """
    require_envs(runs)
    require_comparable(runs)
    names = _names(runs)
    found = {name: evaluation_of(run) for name, run in zip(names, runs, strict=True)}
    usual = _usual([own for own in found.values() if isinstance(own, Evaluation)])
    seen = [diagnosis_of(run) for run in runs]
    beside = usual or _usual([own for own in seen if isinstance(own, Diagnosed)])
    sources = []
    for run, (name, own), diagnosis in zip(runs, found.items(), seen, strict=True):
        counts, gap = _judged(name, own, usual)
        theory, reason = _judged_theory(name, diagnosis, counts, beside)
        sources.append(Source(run, name, counts, gap, theory, reason))
    return sources


def not_evaluated(runs: Sequence[Run]) -> list[Run]:
    """The runs without an evaluation that can stand in a report.

    Raises:
        InputError: as `read_sources`.
    """
    return [source.run for source in read_sources(runs) if source.evaluation is None]


def require_envs(runs: Sequence[Run]) -> None:
    """Refuse configurations that are none of ours.

    Raises:
        InputError: a run whose configuration names no env.
    """
    for run in runs:
        _ = run.env


def _names(runs: Sequence[Run]) -> list[str]:
    """The shortest ends of the runs' paths that tell them all apart."""
    parts = [run.path.resolve().parts for run in runs]
    names = (["/".join(own[-depth:]) for own in parts] for depth in count(1))
    return next(own for own in names if len(set(own)) == len(runs))


def _usual(found: Sequence[Evaluation | Diagnosed]) -> Mapping[str, Any] | None:
    """The protocol that most of them have; of as many, the first one's."""
    if not found:
        return None
    protocols = Counter(repr(own.protocol) for own in found)
    most = protocols.most_common(1)[0][0]
    return next(own.protocol for own in found if repr(own.protocol) == most)


def _judged(
    name: str, own: Evaluation | str, usual: Mapping[str, Any] | None
) -> tuple[Evaluation | None, str]:
    """An evaluation that counts, or why there is none."""
    if isinstance(own, str):
        return None, f"{own}: {_command('evaluate', name, usual)}"
    assert usual is not None
    differs = _differences(own.protocol, usual)
    if not differs:
        return own, ""
    return None, f"its evaluation cannot stand beside the others': {differs}"


def _judged_theory(
    name: str,
    own: Diagnosed | str,
    evaluation: Evaluation | None,
    usual: Mapping[str, Any] | None,
) -> tuple[Diagnosed | None, str]:
    """A diagnosis of what was evaluated, or why there is none."""
    if isinstance(own, str):
        command = _command("diagnose", name, usual)
        return None, f"{own}; make another: {command}" if own else ""
    assert usual is not None
    differs = _differences(own.protocol, usual)
    if not differs and evaluation is not None:
        differs = _differences(
            {"iteration": own.about.get("iteration")},
            {"iteration": evaluation.about.get("iteration")},
            "its evaluation has",
        )
    if not differs:
        return own, ""
    return None, f"its diagnosis cannot stand beside the other numbers: {differs}"


def _differences(
    own: Mapping[str, Any], usual: Mapping[str, Any], has: str = "the others have"
) -> str:
    """What of a protocol is not as usual, in words; empty if all is."""
    return ", ".join(
        f"{key} {own[key]} where {has} {usual[key]}"
        for key in own
        if own[key] != usual[key]
    )


def _command(verb: str, name: str, usual: Mapping[str, Any] | None) -> str:
    """The command that makes what is missing as the others have it."""
    told = dict(usual or {})
    env, checkpoint = told.pop(ENV, AS_TRAINED), told.pop("checkpoint", BEST)
    # A diagnosis need not be of as many episodes, and has its own codes.
    keys = ("episodes", "seed") if verb == "evaluate" else ("seed",)
    words = [f"{key}={told[key]}" for key in keys if key in told]
    words += [f"checkpoint={checkpoint}"] if checkpoint != BEST else []
    if told.get("rescale_codes") and verb == "evaluate":
        words.append("rescale_codes=true")
    if env != AS_TRAINED:
        words += [f"env.{key}={value}" for key, value in env.items()]
    return " ".join(["marl-pool", verb, name, *words])
