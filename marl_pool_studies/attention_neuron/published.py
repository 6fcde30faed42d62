"""Published returns for the rows of ``suite=attention_neuron``.

``published.yaml`` holds them.

Source: Tang and Ha, The Sensory Neuron as a Transformer (2021,
https://arxiv.org/abs/2109.02869), Tables 2 to 6.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from marl_pool.envs import ENVS
from marl_pool.envs.base import BatchedEnv
from marl_pool.evaluation.results import TRAINED, Result
from marl_pool.files.reading import read_yaml
from marl_pool.options.names import resolve
from marl_pool.options.signatures import options_of
from marl_pool.policies.base import Policy
from marl_pool.policies.sensory import FeedForward
from marl_pool.pooling.attention_neuron import AttentionNeuronPooling
from marl_pool.pooling.vision_neuron import VisionNeuronPooling
from marl_pool_studies.attention_neuron.attention_agent import AttentionAgent

FREE = frozenset({"name", "threads", "lap_complete_percent"})
"""Options of the env that a published task leaves open."""
DATA = read_yaml(Path(__file__).with_suffix(".yaml"))


class PublishedTable(NamedTuple):
    """Published returns of one agent."""

    env: Mapping[str, Any]
    """``{"name": …, **options}`` of the environment."""
    agent: str
    """Kind of agent; see `kind_of`."""
    rows: Mapping[str, tuple[float, float]]
    """Mean and standard deviation over episodes, by label of the suite's row."""


class PublishedRow(NamedTuple):
    """A measured row beside the published one."""

    group: str
    label: str
    episodes: int
    mean: float
    mean_low: float
    mean_high: float
    std: float
    published: float
    published_std: float


TABLES = [PublishedTable(**table) for table in DATA["tables"]]
"""Tables 2, 4, 5 and 6."""


def published_rows(
    results: Sequence[Result], policies: Mapping[str, Policy], env: Mapping[str, Any]
) -> list[PublishedRow]:
    """Pair measured rows with the published ones of the same condition.

    ``env`` is ``{"name": …, **options}`` of the clean rows. Tasks other than the
    paper's have no published rows.
    """
    rows = []
    for result in results:
        # The paper has deterministic trained policies, unperturbed or fully perturbed.
        published = published_for(policies[result.group], env)
        plain = result.policy == TRAINED and not (result.stochastic or result.missing)
        is_full = result.severity == float(result.perturbed)
        if plain and is_full and result.label in published:
            measured = [getattr(result, name) for name in PublishedRow._fields[:-2]]
            rows.append(PublishedRow._make([*measured, *published[result.label]]))
    return rows


def published_for(
    policy: Policy, env: Mapping[str, Any]
) -> Mapping[str, tuple[float, float]]:
    """Return the published rows of such a policy in such an env, {} if there are none.

    ``env`` is ``{"name": …, **options}``.
    """
    kind = kind_of(policy)
    for table in TABLES:
        if (table.env["name"], table.agent) != (env["name"], kind):
            continue
        # Compare options, except `FREE` ones, after filling in the defaults.
        parameters = options_of(resolve(env["name"], ENVS, "env", BatchedEnv))
        defaults = {key: option.default for key, option in parameters.items()}
        evaluated, published = {**defaults, **env}, {**defaults, **table.env}
        if all(evaluated[key] == published[key] for key in defaults.keys() - FREE):
            return table.rows
    return {}


def kind_of(policy: Policy) -> str:
    """Return the kind of agent that `PublishedTable` names, or an empty string."""
    modules = [type(module) for module in policy.modules()]
    if AttentionNeuronPooling in modules or VisionNeuronPooling in modules:
        return "attention_neuron"
    if isinstance(policy, AttentionAgent):
        return "attention_agent"
    return "feed_forward" if isinstance(policy, FeedForward) else ""
