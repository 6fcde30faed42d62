"""Trained here, tested there: heat maps of other worlds and of missing tokens."""

from collections.abc import Callable, Mapping, Sequence

from marl_pool.envs.options import counted
from marl_pool.evaluation.heat_map import OCCLUDE, occluded_in_training
from marl_pool.evaluation.report.components import Cell, Heading, Section, Table
from marl_pool.evaluation.report.evaluations import AS_TRAINED
from marl_pool.evaluation.report.methods import ENV, Method
from marl_pool.evaluation.report.robustness import SHADES, measured_cell
from marl_pool.evaluation.report.study import AS_IS, Condition, Measured, Study

NONE = {"name": "none"}
"""What a run has as its ``perturbation`` where there is none."""
Columns = Mapping[str, Condition]
"""Conditions by what stands above them."""
Heads = Mapping[str, Sequence[Measured]]
"""Methods that differ in what they were trained in alone, by what they share."""
Namer = Callable[[Measured], str]
"""What a row is called."""


def elsewhere(study: Study, suffix: str) -> list[Section]:
    """Build the sections of tests in which the world, or what is seen of it, differs.

    Each has a heat map for every pooling head (with its other options): a row for what
    it was trained in, a column for what it was tested in. Where no head was trained in
    several, one heat map has the methods as its rows.
    """
    families: dict[tuple[str, ...], list[Condition]] = {}
    for one in study.conditions:
        if one.kind == "world":
            families.setdefault(tuple(study.row(one)["world"]), []).append(one)
    sections = [
        _worlds(study, keys, conditions, f"{place}{suffix}")
        for place, (keys, conditions) in enumerate(families.items())
    ]
    return sections + _missing(study, suffix)


def _worlds(
    study: Study, keys: Sequence[str], conditions: Sequence[Condition], suffix: str
) -> Section:
    """The worlds that differ in the same options, such as numbers of agents."""
    unchanged = _home(study)
    homes = {
        own.method.name: _equal(study, own.method, conditions) for own in study.measured
    }
    columns = {study.named(one): one for one in conditions}
    if not all(homes.values()):
        columns = {unchanged: AS_IS, **columns}
    scored = study.unit == "score"
    section = Section(
        f"worlds{suffix}",
        f"Other worlds: {', '.join(keys)}",
        "Each row was trained in one world and is tested in those of the columns. A "
        f"{study.unit} belongs to the world of its own column"
        + (f": 0 and 1 are that world's baselines. {SHADES}" if scored else "."),
    )
    heads: dict[str, list[Measured]] = {}
    # In the order of the columns, so that each world meets itself on the diagonal.
    order = [*conditions, None]
    for own in sorted(study.measured, key=lambda o: order.index(homes[o.method.name])):
        heads.setdefault(own.method.head, []).append(own)

    def row(own: Measured) -> str:
        home = homes[own.method.name]
        world = study.named(home) if home else own.method.world or unchanged
        return " ".join(filter(None, (world, own.method.perturbed)))

    section.blocks += _maps(study, heads, columns, "trained in", row)
    return section


def _home(study: Study) -> str:
    """What the world is called that the unperturbed episodes were played in."""
    evaluation = study.measured[0].method.evaluated[0].evaluation
    assert evaluation is not None
    same = evaluation.protocol[ENV] == AS_TRAINED
    return AS_TRAINED if same else "as evaluated"


def _equal(
    study: Study, method: Method, conditions: Sequence[Condition]
) -> Condition | None:
    """The tested world that a method was trained in, if it is one of them."""
    env = method.sources[0].run.config[ENV]
    trained = counted(env)
    return next(
        (o for o in conditions if counted({**env, **study.row(o)["world"]}) == trained),
        None,
    )


def _missing(study: Study, suffix: str) -> list[Section]:
    """Tokens hidden in the test, by the share that was hidden in training."""
    labels = [
        label
        for label in study.labels("rung")
        if study.row(_rungs(study, label)[0])["perturbation"] == OCCLUDE
    ]
    if not labels:
        return []
    section = Section(
        f"occlusion{suffix}",
        "Missing tokens",
        "Columns are the share of tokens that is hidden in the test."
        + (f" {SHADES}" if study.unit == "score" else ""),
    )
    heads: dict[str, list[Measured]] = {}
    for own in study.measured:
        shared = " · ".join(filter(None, (own.method.head, own.method.world)))
        heads.setdefault(shared, []).append(own)
    for label in labels:
        rungs = [one for one in _rungs(study, label) if one.severity]
        columns = {"0%": AS_IS, **{f"{one.severity:.0%}": one for one in rungs}}
        section.blocks.append(Heading(label))
        section.blocks += _maps(study, heads, columns, "missing in training", _hidden)
    return [section]


def _rungs(study: Study, label: str) -> list[Condition]:
    return [Condition("rung", label, severity) for severity in study.severities(label)]


def _hidden(own: Measured) -> str:
    """The share of tokens that was hidden in training, or what else was done."""
    config = own.method.sources[0].run.config
    share = occluded_in_training(config)
    if isinstance(share, list):
        return " to ".join(f"{end:.0%}" for end in share)
    other = (config.get("perturbation") or NONE)["name"] not in (NONE["name"], OCCLUDE)
    return f"{share:.0%}" + (f", {own.method.perturbed}" if other else "")


def _maps(
    study: Study, heads: Heads, columns: Columns, corner: str, row: Namer
) -> list[Heading | Table]:
    """A heat map for each head, or one of all methods where that is enough."""
    if all(len(own) == 1 for own in heads.values()):
        return [_map(study, study.measured, columns, "method", _name)]
    blocks: list[Heading | Table] = []
    for head, own in heads.items():
        blocks += [Heading(head), _map(study, own, columns, corner, row)]
    return blocks


def _map(
    study: Study,
    measured: Sequence[Measured],
    columns: Columns,
    corner: str,
    row: Namer,
) -> Table:
    lines = [
        [
            Cell(row(own)),
            *(measured_cell(study, own, one) for one in columns.values()),
        ]
        for own in measured
    ]
    return Table([corner, *columns], lines)


def _name(own: Measured) -> str:
    return own.method.name
