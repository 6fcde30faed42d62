"""Conversion of trajectories into RLlib episodes, as slices of whole arrays."""

import itertools
from collections.abc import Iterator

import numpy as np
from ray.rllib.core.columns import Columns
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.evaluation.postprocessing import Postprocessing
from torch import Tensor
from torch.utils._pytree import tree_leaves

from marl_pool.rollout import Trajectory

RECORDED = (
    Columns.ACTION_LOGP,
    Columns.ACTION_DIST_INPUTS,
    Columns.VF_PREDS,
    Postprocessing.ADVANTAGES,
    Postprocessing.VALUE_TARGETS,
)
"""Columns stored as the extra model outputs of an episode."""
STATE = "state"
"""Prefix of the columns with the leaves of a recurrent state."""


def to_episodes(
    trajectory: Trajectory,
    advantages: Tensor,
    value_targets: Tensor,
    *,
    group: str,
    module_id: str,
    prefix: str,
    first_steps: np.ndarray,
) -> list[SingleAgentEpisode]:
    """Cut a trajectory into one episode chunk for each life of each agent.

    Args:
        trajectory: fragment of one group, ``(T, num_envs, agents)``.
        advantages: ``(T, num_envs, agents)``.
        value_targets: ``(T, num_envs, agents)``.
        group: name of the group; its agents are named ``group_0``, ….
        module_id: name of the module that acted.
        prefix: start of the chunks' ids, which makes them unique.
        first_steps: ``(num_envs,)`` steps of each current episode before the fragment.
    """
    observations = {
        # RLlib expects T + 1 observations. The last one is never read, because values
        # are recorded, so the one before it is repeated.
        name: _by_agent(tensor, repeat_last=True)
        for name, tensor in trajectory.tokens._asdict().items()
    }
    # Store the state of every step: RLlib may cut a chunk anywhere between learners.
    states = {
        f"{STATE}/{number}": _by_agent(leaf)
        for number, leaf in enumerate(tree_leaves(trajectory.states))
    }
    # Reorder the recorded tensors by environment and agent.
    actions, rewards = _by_agent(trajectory.actions), _by_agent(trajectory.rewards)
    recorded = (trajectory.log_probs, trajectory.logits, trajectory.values)
    arrays = [_by_agent(each) for each in (*recorded, advantages, value_targets)]
    outputs = {**dict(zip(RECORDED, arrays, strict=True)), **states}
    terminated = trajectory.terminated.cpu().numpy()
    truncated = trajectory.truncated.cpu().numpy()
    # Slice each agent's life out of the arrays; the chunks are views, not copies.
    active = _by_agent(trajectory.active)
    steps, num_envs, num_agents = trajectory.rewards.shape
    infos: list[dict] = [{} for _ in range(steps + 1)]
    episodes = []
    for env in range(num_envs):
        ends = (terminated[:, env] | truncated[:, env]).nonzero()[0]
        for agent in range(num_agents):
            for start, stop in _lives(active[env, agent], ends):
                # The episode may have begun in an earlier fragment.
                earlier = ends[ends < start]
                began = earlier[-1] + 1 if len(earlier) else -int(first_steps[env])
                index = (env, agent, slice(start, stop))
                observed = (env, agent, slice(start, stop + 1))
                episodes.append(
                    SingleAgentEpisode(
                        id_=f"{prefix}-{env}-{group}-{agent}-{start}",
                        observations={k: v[observed] for k, v in observations.items()},
                        infos=infos[: stop - start + 1],
                        actions=actions[index],
                        rewards=rewards[index],
                        terminated=bool(terminated[stop - 1, env]),
                        truncated=bool(truncated[stop - 1, env]),
                        extra_model_outputs={k: v[index] for k, v in outputs.items()},
                        t_started=start - began,
                        len_lookback_buffer=0,
                        agent_id=f"{group}_{agent}",
                        module_id=module_id,
                    )
                )
    return episodes


def _by_agent(tensor: Tensor, repeat_last: bool = False) -> np.ndarray:
    """Transpose ``(T, num_envs, agents, …)`` to ``(num_envs, agents, T, …)``."""
    array = tensor.detach().cpu().numpy()
    if repeat_last:
        array = np.concatenate([array, array[-1:]])
    return np.ascontiguousarray(np.moveaxis(array, 0, 2))


def _lives(active: np.ndarray, ends: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yield ``(start, stop)`` of each life of an agent; episode ends cut lives."""
    changes = (active[1:] != active[:-1]).nonzero()[0] + 1
    cuts = np.unique(np.concatenate([[0], changes, ends + 1, [len(active)]]))
    for start, stop in itertools.pairwise(cuts):
        if active[start]:
            yield int(start), int(stop)
