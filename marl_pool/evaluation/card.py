"""Model cards: what a policy is, how to use it, how it was trained and measured."""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from marl_pool.evaluation.results import (
    CLEAN,
    TRAINED,
    Result,
    interval_of,
    policies_in_words,
)
from marl_pool.evaluation.templates import template
from marl_pool.files.hub import HubFolder
from marl_pool.files.manifest import is_intact_json
from marl_pool.files.reading import read_json
from marl_pool.options.names import plug_ins_in
from marl_pool.policies.base import SpecifiedPolicy
from marl_pool.utils.text import printable, quoted
from marl_pool.version import __version__

if TYPE_CHECKING:
    from marl_pool.runs.run import Run

DECIMALS = 3


@dataclass(frozen=True)
class CardContent:
    """Content of a card.

    Attributes:
        target: repository of the card.
        run: run of the policy.
        modules: its policies, by module name.
        document: content of an evaluation's JSON file, if there is one.
        picture: name of the video or animation beside the card, or empty.
        command: command that trains such a policy; empty if it is not known.
        license: identifier of a license, or None to state none.
    """

    target: HubFolder
    run: "Run"
    modules: Mapping[str, SpecifiedPolicy]
    document: Mapping[str, Any] | None = None
    picture: str = ""
    command: str = ""
    license: str | None = None

    @property
    def results(self) -> list[Result]:
        """Rows of the evaluation; random and scripted policies only unperturbed."""
        document = self.document or {"results": []}
        names = [field.name for field in fields(Result)]
        # JSON has no NaN, the default of all numbers.
        rows = [
            Result(**{key: entry[key] for key in names if entry.get(key) is not None})
            for entry in document["results"]
        ]
        return [row for row in rows if row.policy == TRAINED or row.label == CLEAN]

    @property
    def plugins(self) -> list[str]:
        """Classes outside the package that the policy or its environment needs."""
        configs = [policy.config for policy in self.modules.values()]
        return sorted(
            plug_ins_in(self.run.config).union(*map(plug_ins_in, configs))
            - set(self.run.config.get("callbacks") or ())
        )


def write_card(content: CardContent) -> str:
    """Return the card as Markdown, with a YAML header for the hub.

    Needs the extra ``hub``.
    """
    # Escaping would show in Markdown's code; `_table` escapes its cells by itself.
    card = template("marl_pool.evaluation", "card.md.j2", autoescape=False)
    run, record = content.run, content.document or {}
    columns, rows = _table(content.results)
    iteration = record.get("iteration")
    checkpoint = "the saved policy" if iteration is None else f"iteration {iteration}"
    text = card.render(
        header=_header(content),
        name=content.target.name,
        parts=_parts(content),
        version=__version__,
        picture=content.picture,
        source=str(content.target),
        flags="".join(f" --plugin {quoted(name)}" for name in content.plugins),
        loader="load_policy" if len(content.modules) == 1 else "load_policies",
        plugins=content.plugins,
        parameters=f"{num_parameters(content.modules):,}",
        record=record,
        episodes=record.get("episodes"),
        checkpoint=checkpoint,
        columns=columns,
        rows=rows,
        command=content.command,
        trained_version=run.version,
        best=str(run.best or ""),
    )
    return f"{text.rstrip()}\n"


def newest_evaluation(run: "Run") -> Path | None:
    """Return the newest intact evaluation of the run's best policy, if there is one."""
    files = run.evaluation_dir.glob("results*.json")
    for file in sorted(files, key=lambda file: file.stat().st_mtime, reverse=True):
        with suppress(OSError, ValueError, AttributeError, RecursionError):
            document = read_json(file)
            other = document.get("checkpoint") != "best" or document.get("changed")
            if is_intact_json(document) and not (other or run.superseded(document)):
                return file
    return None


def _with_error(row: Result) -> str:
    """Return a mean with half its interval, where that is known."""
    mean, error = (
        f"{number:.{DECIMALS}f}"
        for number in (row.mean, (row.mean_high - row.mean_low) / 2)
    )
    return mean if math.isnan(row.mean_low) else f"{mean} ± {error}"


def _header(content: CardContent) -> str:
    """Return the YAML that the hub reads: library, tags, license and scores."""
    from huggingface_hub import EvalResult, ModelCardData

    env = content.run.env["name"]
    heads = _names(content, "pooling")
    measured = [
        row
        for row in content.results
        if row.label == CLEAN and row.policy == TRAINED and not math.isnan(row.mean)
    ]
    scores = [
        EvalResult(
            task_type="reinforcement-learning",
            dataset_type=env,
            dataset_name=env,
            metric_type="mean_reward",
            metric_name=f"mean return of {row.group}, {row.policy_label}",
            metric_value=_with_error(row),
        )
        for row in measured
    ]
    return ModelCardData(
        library_name="marl_pool",
        license=content.license,
        pipeline_tag="reinforcement-learning",
        tags=["reinforcement-learning", "marl_pool", env, *heads],
        model_name=content.target.name if scores else None,
        eval_results=scores or None,
    ).to_yaml()


def _parts(content: CardContent) -> str:
    """Name pooling heads, encoders and the environment."""
    heads, encoders = _names(content, "pooling"), _names(content, "encoder")
    kinds = [f"`{name}`" for name in dict.fromkeys([*encoders, *heads])]
    env = _cell(content.run.env["name"])
    return f"{', '.join(kinds) or 'A policy'} in the environment `{env}`"


def _names(content: CardContent, part: str) -> list[str]:
    names = (policy.part_name(part) for policy in content.modules.values())
    return list(dict.fromkeys(filter(None, names)))


def num_parameters(modules: Mapping[str, SpecifiedPolicy]) -> int:
    """Count the parameters of all policies."""
    return sum(
        parameter.numel()
        for policy in modules.values()
        for parameter in policy.parameters()
    )


def _table(results: Sequence[Result]) -> tuple[list[str], list[list[str]]]:
    columns = ["policy", "perturbation", "severity", "mean return", "drop", "score"]
    rows = []
    for row, policy in zip(results, policies_in_words(results), strict=True):
        cells = [policy, row.label, f"{row.severity:g}" if row.perturbed else ""]
        if row.missing:
            cells += [f"not measured: {row.missing}", "", ""]
        else:
            cells += [
                interval_of(row, name).text(DECIMALS)
                for name in ("mean", "drop", "score")
            ]
        rows.append([_cell(cell) for cell in cells])
    return columns, rows


def _cell(text: object) -> str:
    return printable(text).replace("|", "\\|").replace("<", "&lt;")
