"""Model cards: what a policy is, how it is used, trained and how robust it was."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from marl_pool.evaluation.results import CLEAN, NAN, TRAINED, Result, interval_of
from marl_pool.files.hub import HubFolder
from marl_pool.files.manifest import is_intact_json
from marl_pool.files.reading import read_json
from marl_pool.options.names import plug_ins_in
from marl_pool.policies.base import SpecifiedPolicy
from marl_pool.utils.text import printable, quoted
from marl_pool.version import __version__

if TYPE_CHECKING:
    from marl_pool.runs.run import Run

SEAL = "<!-- marl-pool push: sha256 {} -->\n"
"""Last line of a card, which tells it from another's, or from one that was edited."""
DECIMALS = 3


@dataclass(frozen=True)
class CardContent:
    """Content of a card.

    Attributes:
        target: repository of the card.
        run: run of the policy.
        modules: its policies, by module name.
        document: content of an evaluation's JSON file, or None without one.
        picture: name of the moving picture beside the card; empty for none.
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
        """Rows of the evaluation; random and scripted policies only where clean."""
        document = self.document or {"results": []}
        names = {field.name for field in fields(Result)}
        rows = []
        for entry in document["results"]:
            values: dict[str, Any] = {key: entry[key] for key in names & entry.keys()}
            # JSON has no NaN.
            missing = [key for key, value in values.items() if value is None]
            rows.append(Result(**(values | dict.fromkeys(missing, NAN))))
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
    """Return the card as Markdown, with a YAML header for the hub and a seal.

    Needs the extra ``hub``.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    # Markdown has no markup that could be escaped in code; cells are, in `_rows`.
    environment = Environment(
        loader=PackageLoader("marl_pool.evaluation", "."),
        autoescape=False,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    run, record = content.run, content.document or {}
    columns, rows = _table(content.results)
    source = str(content.target)
    text = environment.get_template("card.md.j2").render(
        header=_header(content),
        name=content.target.name,
        parts=_parts(content),
        version=__version__,
        picture=content.picture,
        source=source,
        flags="".join(f" --plugin {quoted(name)}" for name in content.plugins),
        loader="load_policy" if len(content.modules) == 1 else "load_policies",
        plugins=content.plugins,
        parameters=f"{num_parameters(content.modules):,}",
        record=record,
        episodes=record.get("episodes"),
        checkpoint=_checkpoint(record),
        columns=columns,
        rows=rows,
        command=content.command,
        trained_version=run.version,
        best=str(run.best or ""),
    )
    text = f"{text.rstrip()}\n\n"
    return text + SEAL.format(_digest(text))


def is_sealed(card: str) -> bool:
    """Return True for a card of `write_card` that nobody has edited."""
    text = card[: card.rfind("<!--")]
    return card == text + SEAL.format(_digest(text))


def newest_evaluation(run: "Run") -> Path | None:
    """Return the newest intact evaluation of the run's best policy, if there is one."""
    files = run.evaluation_dir.glob("results*.json")
    for file in sorted(files, key=lambda file: file.stat().st_mtime, reverse=True):
        document = read_json(file)
        is_best = document.get("checkpoint") == "best" and not document.get("changed")
        if is_intact_json(document) and is_best and not run.superseded(document):
            return file
    return None


def _header(content: CardContent) -> str:
    """Return the YAML that the hub reads: library, tags, license and scores."""
    from huggingface_hub import EvalResult, ModelCardData

    env = str(content.run.config["env"]["name"])
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
            metric_value=f"{row.mean:.{DECIMALS}f} ± "
            f"{(row.mean_high - row.mean_low) / 2:.{DECIMALS}f}",
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
    env = _cell(content.run.config["env"]["name"])
    return f"{', '.join(kinds) or 'A policy'} in the environment `{env}`"


def _names(content: CardContent, section: str) -> list[str]:
    configs = [policy.config.get(section) for policy in content.modules.values()]
    names = (config["name"] for config in configs if isinstance(config, Mapping))
    return list(dict.fromkeys(map(str, names)))


def num_parameters(modules: Mapping[str, SpecifiedPolicy]) -> int:
    """Count the parameters of all policies."""
    return sum(
        parameter.numel()
        for policy in modules.values()
        for parameter in policy.parameters()
    )


def _checkpoint(record: Mapping[str, Any]) -> str:
    iteration = record.get("iteration")
    return f"iteration {iteration}" if iteration is not None else "the saved policy"


def _table(results: Sequence[Result]) -> tuple[list[str], list[list[str]]]:
    columns = ["policy", "perturbation", "severity", "mean return", "drop", "score"]
    rows = []
    several = len({row.group for row in results}) > 1
    for row in results:
        policy = f"{row.group}: {row.policy_label}" if several else row.policy_label
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


def _digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()
