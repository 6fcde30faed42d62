"""Transfer: heat maps of training environments by test environments."""

from collections.abc import Callable, Mapping, Sequence

from marl_pool.envs.options import expand_counts
from marl_pool.evaluation.plots.heat_map import OCCLUDE, occluded_in_training
from marl_pool.evaluation.report.components import (
    Component,
    Heading,
    PageSection,
    Table,
    TableCell,
)
from marl_pool.evaluation.report.evaluations import AS_TRAINED
from marl_pool.evaluation.report.group_scores import GroupScores, MethodScores
from marl_pool.evaluation.report.methods import ENV, Method
from marl_pool.evaluation.report.robustness import score_cell
from marl_pool.evaluation.report.table import UNPERTURBED, Condition

NONE = {"name": "none"}
"""The section ``perturbation`` of a run without one."""
Columns = Mapping[str, Condition]
"""Conditions by column heading."""
NameOf = Callable[[MethodScores], str]


def transfer(group: GroupScores) -> list[PageSection]:
    """Build the sections of tests in other environments and of missing tokens.

    Each has a heat map for every head, with a row for each training condition and a
    column for each test condition. If no head was trained under several, one heat map
    has the methods as its rows.
    """
    families: dict[tuple[str, ...], list[Condition]] = {}
    for one in group.of_kind("environment"):
        families.setdefault(tuple(group.row(one)["transfer_env"]), []).append(one)
    sections = [
        _environments(group, keys, conditions, str(place))
        for place, (keys, conditions) in enumerate(families.items())
    ]
    return sections + _missing_tokens(group)


def _environments(
    group: GroupScores,
    keys: Sequence[str],
    conditions: Sequence[Condition],
    number: str,
) -> PageSection:
    """Environments that differ in the same options, such as numbers of agents."""
    evaluation = group.measured[0].method.evaluated[0].evaluation
    assert evaluation is not None
    same = evaluation.protocol[ENV] == AS_TRAINED
    unchanged = AS_TRAINED if same else "as evaluated"
    homes = {
        own.method.name: _training_env(group, own.method, conditions)
        for own in group.measured
    }
    columns = {group.named(one): one for one in conditions}
    if not all(homes.values()):
        columns = {unchanged: UNPERTURBED, **columns}
    # Rows in the order of the columns put equal environments on the diagonal.
    order = [*conditions, None]
    rows = sorted(group.measured, key=lambda own: order.index(homes[own.method.name]))

    def row_name(own: MethodScores) -> str:
        home = homes[own.method.name]
        env = group.named(home) if home else own.method.env or unchanged
        return " ".join(filter(None, (env, own.method.perturbed)))

    maps = _maps(
        group, rows, lambda own: own.method.head, columns, "trained in", row_name
    )
    facts = {"options": ", ".join(keys), "unit": group.unit}
    return PageSection("transfer", maps, facts, number)


def _training_env(
    group: GroupScores, method: Method, conditions: Sequence[Condition]
) -> Condition | None:
    """The test environment that equals the training environment of a method."""
    env = method.runs[0].run.config[ENV]
    trained = expand_counts(env)
    for one in conditions:
        if expand_counts({**env, **group.row(one)["transfer_env"]}) == trained:
            return one
    return None


def _missing_tokens(group: GroupScores) -> list[PageSection]:
    """Tokens occluded in the test, by the fraction occluded in training."""
    levels = {label: group.levels(label) for label in group.labels("level")}
    occluded = {
        label: own
        for label, own in levels.items()
        if own and group.row(own[0])["perturbation"] == OCCLUDE
    }
    components: list[Component] = []
    for label, own in occluded.items():
        columns = {"0%": UNPERTURBED} | {f"{one.severity:.0%}": one for one in own}
        components.append(Heading(label))
        components += _maps(
            group, group.measured, _head, columns, "missing in training", _occluded
        )
    facts = {"unit": group.unit}
    section = PageSection("occlusion", components, facts)
    return [section] if occluded else []


def _head(own: MethodScores) -> str:
    return " · ".join(filter(None, (own.method.head, own.method.env)))


def _occluded(own: MethodScores) -> str:
    """The fraction of tokens occluded in training, and other perturbations in it."""
    config = own.method.runs[0].run.config
    share = occluded_in_training(config)
    if isinstance(share, list):
        return " to ".join(f"{end:.0%}" for end in share)
    other = (config.get("perturbation") or NONE)["name"] not in (NONE["name"], OCCLUDE)
    return f"{share:.0%}" + (f", {own.method.perturbed}" if other else "")


def _maps(
    group: GroupScores,
    measured: Sequence[MethodScores],
    head_of: NameOf,
    columns: Columns,
    corner: str,
    row_name: NameOf,
) -> list[Component]:
    """A heat map for each head, or one of all methods if each head has one row."""
    heads: dict[str, list[MethodScores]] = {}
    for own in measured:
        heads.setdefault(head_of(own), []).append(own)
    titled = len(heads) < len(measured)
    if not titled:
        heads, corner = {"": group.measured}, "method"
    components: list[Component] = []
    for head, methods in heads.items():
        lines = []
        for own in methods:
            cells = (score_cell(group, own, one) for one in columns.values())
            name = row_name(own) if titled else own.method.name
            lines.append([TableCell(name), *cells])
        components += [Heading(head)] if titled else []
        components.append(Table([corner, *columns], lines))
    return components
