"""What a paper reports for the rows of ``suite=attention_neuron``."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from marl_pool.envs import ENVS
from marl_pool.envs.base import BatchedEnv
from marl_pool.evaluation.results import CLEAN, TRAINED, Result
from marl_pool.policies.attention_agent import AttentionAgent
from marl_pool.policies.base import Policy
from marl_pool.policies.feed_forward import FeedForward
from marl_pool.pooling.attention_neuron import AttentionNeuronPooling
from marl_pool.pooling.vision_neuron import VisionNeuronPooling
from marl_pool.utils.names import resolve
from marl_pool.utils.signatures import options_of

Row = tuple[float, float]
"""Mean and standard deviation over episodes."""

PERIODS = (25, 50, 100, 200, 500)
FREE = frozenset({"name", "threads", "lap_complete_percent"})
"""Options that make no other task, or that no published number settles."""


@dataclass(frozen=True)
class Published:
    """One agent's rows.

    Attributes:
        env: the world's name.
        agent: its kind; see `kind_of`.
        rows: by label.
        options: of the env that differ from the defaults.
    """

    env: str
    agent: str
    rows: Mapping[str, Row]
    options: Mapping[str, Any]


def _reshuffled(*rows: Row, scope: str = "") -> dict[str, Row]:
    """Table 6: for Pong and CarRacing the paper permutes frames before stacking them.

    Orders of whole stacks are another test, which no memoryless invariant agent fails.
    """
    labels = [f"shuffle every={period}{scope}" for period in PERIODS]
    return dict(zip(labels, rows, strict=True))


FRAMES = " scope=frame"


TWICE, NOISY = "two of each channel", "five noise channels"
"""Labels of the suite's other worlds, which the CartPole rows take."""

TABLES = (
    Published(
        "cartpole",
        "attention_neuron",
        {
            CLEAN: (472, 426),
            "shuffle": (471, 426),
            TWICE: (471, 425),
            NOISY: (461, 410),
            **_reshuffled((107, 146), (163, 198), (242, 254), (318, 310), (407, 380)),
        },
        {},
    ),
    Published(
        "cartpole", "feed_forward", {CLEAN: (593, 433), "shuffle": (38, 120)}, {}
    ),
    Published(
        "cartpole",
        "feed_forward",
        {CLEAN: (593, 433), TWICE: (593, 433), NOISY: (137, 242)},
        {"duplicates": 2},
    ),
    Published(
        "ant_bullet",
        "attention_neuron",
        {
            CLEAN: (2576, 75),
            "shuffle": (2576, 75),
            **_reshuffled(
                (2053, 225), (2319, 188), (2406, 178), (2493, 105), (2548, 87)
            ),
        },
        {},
    ),
    Published(
        "ant_bullet", "feed_forward", {CLEAN: (2700, 28), "shuffle": (232, 112)}, {}
    ),
    Published(
        "pong",
        "attention_neuron",
        {
            CLEAN: (21, 0),
            "shuffle": (21, 0),
            **_reshuffled(
                (-20, 1), (-20, 2), (-10, 12), (-2, 17), (18, 9), scope=FRAMES
            ),
        },
        {},
    ),
    Published(
        "car_racing",
        "attention_neuron",
        {
            CLEAN: (801, 147),
            **_reshuffled(
                (732, 161),
                (772, 163),
                (768, 167),
                (774, 182),
                (805, 158),
                scope=FRAMES,
            ),
        },
        {},
    ),
    Published(
        "car_racing",
        "attention_agent",
        {CLEAN: (901, 54)},
        {
            "patch": 7,
            "stride": 4,
            "num_frames": 1,
            "color": "rgb",
            "zero_rows_bottom": 0,
        },
    ),
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


def with_published(
    results: Sequence[Result], policies: Mapping[str, Policy], env: Mapping[str, Any]
) -> list[Result]:
    """Put the paper's numbers beside the rows that measure the same.

    Args:
        results: of an evaluation.
        policies: by group.
        env: of the clean rows. Nothing is published for other tasks.
    """
    compared = []
    for result in results:
        rows = published_for(policies[result.group], env)
        plain = result.policy == TRAINED and not result.stochastic
        if plain and result.label in rows and result.severity in (0.0, 1.0):
            mean, std = rows[result.label]
            result = replace(result, published=mean, published_std=std)
        compared.append(result)
    return compared


def published_for(policy: Policy, env: Mapping[str, Any]) -> Mapping[str, Row]:
    """The paper's rows for such a policy in such a world, by label; {} for none."""
    kind = kind_of(policy)
    for table in TABLES:
        if (table.env, table.agent) == (env["name"], kind) and _alike(table, env):
            return table.rows
    return {}


def kind_of(policy: Policy) -> str:
    """``"attention_neuron"``, ``"attention_agent"`` alone, ``"feed_forward"`` or ""."""
    parts = [type(part) for part in policy.modules()]
    if AttentionNeuronPooling in parts or VisionNeuronPooling in parts:
        return "attention_neuron"
    if isinstance(policy, AttentionAgent):
        return "attention_agent"
    return "feed_forward" if isinstance(policy, FeedForward) else ""


def _alike(table: Published, env: Mapping[str, Any]) -> bool:
    """Whether a world is the paper's: its options are the defaults but for some."""
    known = options_of(resolve(table.env, ENVS, "env", BatchedEnv))
    defaults = {key: option.default for key, option in known.items()}
    found, wanted = {**defaults, **env}, {**defaults, **table.options}
    return all(found[key] == wanted[key] for key in defaults if key not in FREE)
