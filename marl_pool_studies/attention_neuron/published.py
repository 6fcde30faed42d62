"""Published returns for the rows of ``suite=attention_neuron``.

Source: Tang and Ha, The Sensory Neuron as a Transformer (2021,
https://arxiv.org/abs/2109.02869), Tables 2 to 6.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from marl_pool.envs import ENVS
from marl_pool.envs.base import BatchedEnv
from marl_pool.evaluation.results import CLEAN, TRAINED, Result
from marl_pool.options.names import resolve
from marl_pool.options.signatures import options_of
from marl_pool.policies.base import Policy
from marl_pool.policies.sensory import FeedForward
from marl_pool.pooling.attention_neuron import AttentionNeuronPooling
from marl_pool.pooling.vision_neuron import VisionNeuronPooling
from marl_pool_studies.attention_neuron.attention_agent import AttentionAgent

MeanStd = tuple[float, float]
"""Mean and standard deviation over episodes."""

PERIODS = (25, 50, 100, 200, 500)
FREE = frozenset({"name", "threads", "lap_complete_percent"})
"""Options of the env that a published task leaves open."""


class PublishedTable(NamedTuple):
    """Published returns of one agent."""

    env: str
    """Name of the environment."""
    agent: str
    """Kind of agent; see `kind_of`."""
    rows: Mapping[str, MeanStd]
    """Mean and standard deviation by label of the suite's row."""
    options: Mapping[str, Any] = {}
    """Options of the env that differ from the defaults."""


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


def _reshuffled(rows: Sequence[MeanStd], scope: str = "") -> dict[str, MeanStd]:
    """Return Table 6's rows by label.

    For Pong and CarRacing the paper permutes frames before stacking them. Orders of
    whole stacks are another test, which no memoryless invariant agent fails.
    """
    labels = [f"shuffle every={period}{scope}" for period in PERIODS]
    return dict(zip(labels, rows, strict=True))


FRAMES = " scope=frame"
TWICE, NOISY = "two of each channel", "five noise channels"
"""Labels of the suite's transfer environments that have published CartPole rows."""

CAR_RACING = {
    "patch": 7,
    "stride": 4,
    "num_frames": 1,
    "color": "rgb",
    "zero_rows_bottom": 0,
}
"""Options of the environment of the published AttentionAgent."""
TABLES = (
    PublishedTable(
        "cartpole",
        "attention_neuron",
        {
            CLEAN: (472, 426),
            "shuffle": (471, 426),
            TWICE: (471, 425),
            NOISY: (461, 410),
            **_reshuffled([(107, 146), (163, 198), (242, 254), (318, 310), (407, 380)]),
        },
    ),
    PublishedTable(
        "cartpole", "feed_forward", {CLEAN: (593, 433), "shuffle": (38, 120)}
    ),
    PublishedTable(
        "cartpole",
        "feed_forward",
        {CLEAN: (593, 433), TWICE: (593, 433), NOISY: (137, 242)},
        {"duplicates": 2},
    ),
    PublishedTable(
        "ant_bullet",
        "attention_neuron",
        {CLEAN: (2576, 75), "shuffle": (2576, 75)}
        | _reshuffled([(2053, 225), (2319, 188), (2406, 178), (2493, 105), (2548, 87)]),
    ),
    PublishedTable(
        "ant_bullet", "feed_forward", {CLEAN: (2700, 28), "shuffle": (232, 112)}
    ),
    PublishedTable(
        "pong",
        "attention_neuron",
        {CLEAN: (21, 0), "shuffle": (21, 0)}
        | _reshuffled([(-20, 1), (-20, 2), (-10, 12), (-2, 17), (18, 9)], FRAMES),
    ),
    PublishedTable(
        "car_racing",
        "attention_neuron",
        {CLEAN: (801, 147)}
        | _reshuffled(
            [(732, 161), (772, 163), (768, 167), (774, 182), (805, 158)], FRAMES
        ),
    ),
    PublishedTable("car_racing", "attention_agent", {CLEAN: (901, 54)}, CAR_RACING),
)
"""Tables 2, 4, 5 and 6 of Tang and Ha (2021). For Ant, the agent found by evolution and
the teacher (the published weights are another one, which scores 1844)."""

REGRESSION = {
    "position": 0.354,
    "velocity": 0.620,
    "cos": 0.626,
    "sin": 0.233,
    "angular_velocity": 0.550,
}
"""Table 3: R² of CartPole's channels on the codes. The fifth is the angle's velocity,
as in the code; section 4.1 of the paper lists the angle."""


def published_rows(
    results: Sequence[Result], policies: Mapping[str, Policy], env: Mapping[str, Any]
) -> list[PublishedRow]:
    """Pair measured rows with the published ones of the same condition.

    ``env`` is ``{"name": …, **options}`` of the clean rows. Other tasks than the
    paper's have no published rows.
    """
    rows = []
    for result in results:
        # The paper has deterministic trained policies, unperturbed or fully perturbed.
        published = published_for(policies[result.group], env)
        plain = result.policy == TRAINED and not (result.stochastic or result.missing)
        if plain and result.label in published and result.severity in (0.0, 1.0):
            measured = [getattr(result, name) for name in PublishedRow._fields[:-2]]
            rows.append(PublishedRow._make([*measured, *published[result.label]]))
    return rows


def published_for(policy: Policy, env: Mapping[str, Any]) -> Mapping[str, MeanStd]:
    """Return the published rows of such a policy in such an env, {} if there are none.

    ``env`` is ``{"name": …, **options}``.
    """
    kind = kind_of(policy)
    for table in TABLES:
        if (table.env, table.agent) != (env["name"], kind):
            continue
        # Compare options, except `FREE` ones, after filling in the defaults.
        parameters = options_of(resolve(table.env, ENVS, "env", BatchedEnv))
        defaults = {key: option.default for key, option in parameters.items()}
        evaluated, published = {**defaults, **env}, {**defaults, **table.options}
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
