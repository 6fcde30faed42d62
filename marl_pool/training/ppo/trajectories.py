"""Trajectories as training data: advantages, rows of tensors, and RLlib episodes."""

import itertools
import operator
from collections.abc import Iterator

import numpy as np
import torch
from ray.rllib.core.columns import Columns
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.evaluation.postprocessing import Postprocessing
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from marl_pool.policies.actions import ActionSpec
from marl_pool.training.ppo.batch import BEGINS, CRITIC_OBS, STATE, Rows, map_rows
from marl_pool.trajectory import Trajectory

RECORDED = (
    Columns.ACTION_LOGP,
    Columns.ACTION_DIST_INPUTS,
    Columns.VF_PREDS,
    Postprocessing.ADVANTAGES,
    Postprocessing.VALUE_TARGETS,
)
"""Columns of a step besides its observation, action and state; RLlib stores them as the
extra model outputs of an episode."""


def estimate_advantages(
    trajectory: Trajectory, gamma: float, gae_lambda: float
) -> tuple[Tensor, Tensor]:
    r"""Estimate advantages and value targets.

    .. math::
        \hat A_t = \delta_t + \gamma \lambda \hat A_{t+1}, \qquad
        \delta_t = r_t + \gamma V(s_{t+1}) - V(s_t)

    The value target is :math:`\hat A_t + V(s_t)`. A truncation and the end of the
    fragment bootstrap from the value of the next observation; a termination and an
    agent's death do not.

    Source: Schulman et al., High-dimensional continuous control using generalized
    advantage estimation (2016), equation 16, https://arxiv.org/abs/1506.02438.

    Args:
        trajectory: fragment of ``T`` steps, with the values recorded while sampling.
        gamma: discount, in [0, 1].
        gae_lambda: λ, in [0, 1].

    Returns:
        Advantages and value targets, both ``(T, num_envs, agents)``.
    """
    ended = (trajectory.terminated | trajectory.truncated)[..., None]
    lives = trajectory.next_active
    # Bootstrap at a truncation, but not at a termination or death.
    bootstraps = lives & ~trajectory.terminated[..., None]
    next_values = torch.where(bootstraps, trajectory.next_values, 0.0)
    errors = trajectory.rewards + gamma * next_values - trajectory.values
    # Sum the errors backwards in time, within an episode and an agent's life.
    decay = gamma * gae_lambda * (lives & ~ended)
    advantages = torch.empty_like(errors)
    running = torch.zeros_like(errors[0])
    for t in reversed(range(len(errors))):
        running = errors[t] + decay[t] * running
        advantages[t] = running
    return advantages, advantages + trajectory.values


def own_turns(trajectory: Trajectory) -> Trajectory:
    """Reduce a fragment to the turns of each agent, one after the other.

    Between two turns of an agent the others act, while it may earn rewards, and its
    policy's state stays the same. A turn is thus followed by the agent's next turn or
    the end of its life. A turn for which neither is known, because the fragment or a
    time limit ended first, is left out.

    Args:
        trajectory: fragment ``(T, num_envs, agents)``, of any environment.

    Returns:
        The unchanged fragment, if all living agents act in all steps. Otherwise one
        with a one-agent environment for each agent, ``(turns, num_envs · agents, 1)``;
        ``active`` is False after an agent's last turn.
    """
    alive = trajectory.next_alive
    if alive is None:
        return trajectory
    active, acts_next = trajectory.active, trajectory.next_active
    terminated, truncated = (
        ends[..., None].expand_as(active)
        for ends in (trajectory.terminated, trajectory.truncated)
    )
    # A turn lasts until the agent's next turn, its death or the end of the episode.
    lasts = acts_next | terminated | truncated | ~alive
    rewards = trajectory.rewards.clone()
    final = torch.arange(len(active), device=active.device)[:, None, None]
    final = final.expand_as(active).clone()
    for t in reversed(range(len(active) - 1)):
        goes_on = ~lasts[t]
        rewards[t] += torch.where(goes_on, rewards[t + 1], 0.0)
        final[t] = torch.where(goes_on, final[t + 1], final[t])
    is_complete = (acts_next | terminated | ~alive).gather(0, final)
    # A turn that is followed by none, or by one left out, is the last of a sequence.
    kept = active & is_complete
    is_followed = kept.roll(-1, 0)
    is_followed[-1] = False
    is_last = truncated | ~(is_followed | terminated)
    turns = trajectory._replace(
        rewards=rewards,
        next_values=trajectory.next_values.gather(0, final),
        terminated=terminated.gather(0, final),
        truncated=is_last.gather(0, final),
        next_active=(alive & acts_next).gather(0, final),
        active=kept,
        next_alive=None,
        alive=None,
    )
    # Put the turns of each agent at the beginning.
    count = max(1, int(kept.sum(0).max()))
    order = (~kept).byte().argsort(stable=True, dim=0)[:count].flatten(1)
    columns = torch.arange(order.shape[1], device=order.device)

    def gather(tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        return tensor.flatten(1, 2)[order, columns][:, :, None]

    gathered: Trajectory = tree_map(gather, turns)
    return gathered._replace(
        terminated=gathered.terminated[..., 0], truncated=gathered.truncated[..., 0]
    )


def with_action_mask(trajectory: Trajectory, actions: ActionSpec) -> Trajectory:
    """Add a mask that allows all options, if the tokens have no action mask."""
    tokens = trajectory.tokens
    if tokens.action_mask is not None:
        return trajectory
    # A selecting policy may perceive more tokens than the environment has.
    selectable = actions.num_fixed + tokens.num_tokens
    count = selectable if actions.selects else actions.num_options
    mask = torch.ones_like(tokens.types[..., :1], dtype=torch.bool)
    mask = mask.expand(*tokens.batch_shape, count)
    return trajectory._replace(tokens=tokens._replace(action_mask=mask))


def share_rewards(trajectory: Trajectory) -> Trajectory:
    """Replace each step's rewards by their mean over the agents that are present.

    The mean, not the sum, keeps the scale of returns where the number of agents varies.

    Args:
        trajectory: fragment ``(T, num_envs, agents)``, of any environment.
    """
    present = trajectory.active if trajectory.alive is None else trajectory.alive
    earned = torch.where(present, trajectory.rewards, 0.0)
    count = present.sum(-1, keepdim=True).clamp(min=1)
    shared = earned.sum(-1, keepdim=True) / count
    return trajectory._replace(rewards=torch.where(present, shared, 0.0))


def to_teams(
    trajectory: Trajectory, advantages: Tensor, value_targets: Tensor, size: int
) -> tuple[Trajectory, Tensor, Tensor]:
    """Join the agents of each team into one agent, with a dimension for its members.

    Args:
        trajectory: fragment ``(T, num_envs, agents)``.
        advantages: ``(T, num_envs, agents)``.
        value_targets: ``(T, num_envs, agents)``.
        size: slots for agents, at least their number; the others are absent.

    Returns:
        The arguments as ``(T, num_envs, 1, size, …)``, with `Trajectory.team`; rewards
        and ``active`` are the team's, ``(T, num_envs, 1)``.
    """
    missing = size - trajectory.rewards.shape[2]

    def join(column: Tensor) -> Tensor:
        empty = column.new_zeros((*column.shape[:2], missing, *column.shape[3:]))
        return torch.cat([column, empty], 2)[:, :, None]

    columns = ("tokens", "actions", "log_probs", "logits", "values", "critic_tokens")
    joined = {
        name: tree_map(lambda leaf: None if leaf is None else join(leaf), part)
        for name in columns
        if (part := getattr(trajectory, name)) is not None
    }
    team = trajectory._replace(
        **joined,
        rewards=trajectory.rewards.sum(2, keepdim=True),
        active=trajectory.active.any(2, keepdim=True),
        next_active=trajectory.next_active.any(2, keepdim=True),
        team=join(trajectory.active),
    )
    return team, join(advantages), join(value_targets)


def trajectory_rows(
    trajectory: Trajectory, advantages: Tensor, value_targets: Tensor
) -> Rows:
    """Return the steps of one group, agent by agent, on the trajectory's device.

    They are in the order of the chunks of `to_episodes`.

    Args:
        trajectory: fragment of one group, ``(T, num_envs, agents)``.
        advantages: ``(T, num_envs, agents)``.
        value_targets: ``(T, num_envs, agents)``.
    """
    # A chunk begins with the fragment, an episode or an agent's life.
    ended = (trajectory.terminated | trajectory.truncated)[..., None]
    begins = torch.ones_like(trajectory.active)
    begins[1:] = ended[:-1] | ~trajectory.active[:-1]
    columns = {
        Columns.OBS: trajectory.tokens.columns,
        **(
            {CRITIC_OBS: trajectory.critic_tokens.columns}
            if trajectory.critic_tokens is not None
            else {}
        ),
        Columns.ACTIONS: trajectory.actions,
        **_recorded(trajectory, advantages, value_targets),
        BEGINS: begins,
    }
    # Order by environment, agent and time; drop the steps of inactive agents.
    rows = map_rows(lambda tensor: tensor.movedim(0, 2).flatten(0, 2), columns)
    active = trajectory.active.movedim(0, 2).flatten()
    return rows if active.all() else map_rows(operator.itemgetter(active), rows)


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
        for name, tensor in trajectory.tokens.columns.items()
    }
    if trajectory.critic_tokens is not None:
        observations |= {
            f"{CRITIC_OBS}/{name}": _by_agent(tensor, repeat_last=True)
            for name, tensor in trajectory.critic_tokens.columns.items()
        }
    # Reorder the recorded tensors by environment and agent. Store the state of every
    # step: RLlib may cut a chunk anywhere between learners.
    actions, rewards = _by_agent(trajectory.actions), _by_agent(trajectory.rewards)
    recorded = _recorded(trajectory, advantages, value_targets)
    outputs = {key: _by_agent(tensor) for key, tensor in recorded.items()}
    terminated = trajectory.terminated.cpu().numpy()
    truncated = trajectory.truncated.cpu().numpy()
    # Slice each agent's life out of the arrays; the chunks are views, not copies.
    active = _by_agent(trajectory.active)
    steps, num_envs, num_agents = trajectory.active.shape
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


def _recorded(
    trajectory: Trajectory, advantages: Tensor, value_targets: Tensor
) -> dict[str, Tensor]:
    """Return the columns `RECORDED`, the leaves of the states and a team's mask."""
    tensors = (trajectory.log_probs, trajectory.logits, trajectory.values)
    leaves = tree_leaves(trajectory.states)
    return {
        **dict(zip(RECORDED, (*tensors, advantages, value_targets), strict=True)),
        **{f"{STATE}/{number}": leaf for number, leaf in enumerate(leaves)},
        **({} if trajectory.team is None else {Columns.LOSS_MASK: trajectory.team}),
    }


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
