"""Any PettingZoo environment as a batched environment."""

import warnings
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from marl_pool.envs.base import Advance, AgentGroup, EnvOptions
from marl_pool.envs.pettingzoo.env_copy import (
    FrameRenderer,
    ParallelSimulator,
    ParallelStep,
    build_env,
)
from marl_pool.envs.pettingzoo.states import StateTokens, check_state_tokens
from marl_pool.envs.pettingzoo.teams import (
    TRUNCATED,
    PettingZooTeam,
    StepArrays,
    decode,
    make_teams,
)
from marl_pool.envs.pettingzoo.views import (
    Channels,
    Drop,
    Indices,
    MaxTokens,
    Names,
    Padding,
    Presence,
    ViewMaker,
)
from marl_pool.envs.pettingzoo.workers import EnvWorkers, RemoteSimulator
from marl_pool.envs.simulation import ActionLog, ReplayedEnv, Simulator, reset_seeds
from marl_pool.observations.masks import MASK
from marl_pool.observations.view import with_action_mask
from marl_pool.options.types import (
    Episodes,
    NonNegativeInt,
    Processes,
    Size,
)
from marl_pool.tokens import Tokens, TokenSpec
from marl_pool.utils.errors import InputError


class PettingZooEnv(ReplayedEnv[ParallelStep]):
    """Play a third-party PettingZoo environment, in batches and with tokens.

    By default the environments of a batch are stepped one after another in Python, and
    the computations on their results are batched.

    *Processes.* With ``env.workers=2`` the environments are stepped in two processes at
    the same time, in training, evaluation and checks; pictures are drawn in the main
    process. Seeds, results and errors are the same, and a run may be evaluated with
    another number. Each process takes seconds to start and imports torch and the
    environment, so processes pay off where a step of the batch takes long, as
    ``docs/benchmarks.md`` measures, and not beyond the number of idle cores.

    *Observations* of any space but Text, Graph and OneOf become tokens. A vector is
    converted by a tokenizer. A dict of ``features``, ``types`` and ``padding`` is
    tokens already. A matrix ``(N, F)`` is N tokens, one for each row. An image
    ``(H, W, C)``, or ``(H, W)`` of bytes, is cut into patches, each with its row and
    column, from 0 to 1, as its first two features. A Discrete is a one-hot token, as is
    each number of a MultiDiscrete. A Dict or Tuple is the tokens of all its entries,
    each entry with a type named by its path, such as ``map/walls``; an entry ``self``
    is the observer's own, and a vector in it is one token. The entry ``action_mask`` of
    a Dict, or of an agent's infos from the reset on, is 1 for the options of its
    choices that are allowed, and 0 for the others, which no policy takes. It is not a
    token, and at least one option of each choice has to be allowed.

    *Actions* are Discrete, MultiDiscrete, MultiBinary, a bounded Box of floats of one
    dimension, or a Tuple or Dict of them. In a batch an action is a row of numbers, as
    `marl_pool.policies.action_spaces.ActionRows` makes it: choices, counted from 0,
    then the numbers of Boxes. The mask of several choices is one row, or a tuple or
    matrix with a mask for each choice, in their order.

    Options that describe the observations hold for all groups; a mapping gives values
    by group: ``env.presence={car: 0}``.

    *Agents* may leave, join and rejoin during an episode, though PettingZoo's
    ``parallel_api_test`` does not allow the last. An absent agent has reward 0,
    observes padding only, and its action is ignored. An agent leaves when a step flags
    it as terminated or truncated, even if ``env.agents`` still lists it; it must then
    stay flagged and earn nothing. The value of an agent that is truncated while others
    stay is not bootstrapped. When the last agents leave in the same step, those that
    are truncated and not terminated stay active and the episode is truncated; if all of
    them terminate, the episode is terminated. An environment that breaks another rule
    of PettingZoo is refused, with an error that names the step, the agent and the rule:
    an agent that leaves without a flag, or stays after one and loses it; a missing
    observation, reward or flag; a reward that is not one number; a flag of another name
    such as ``__all__``; an info that is not a dict. An info may be missing, and
    PettingZoo allows observations and infos of other names, such as ``common``, which
    are ignored.

    *Turns.* A turn-based (AEC) environment is played in cycles of all agents where its
    metadata says ``is_parallelizable``: each agent has one turn, in the order of
    ``env.agents``, and may end at the end of a cycle only. Otherwise a step is one
    turn, which counts for ``max_steps``: only the agent in turn observes, acts and
    learns; the others observe padding only. PPO credits an action with the rewards
    until the agent's next turn, discounts by turns, and leaves out a turn that the end
    of the fragment or ``max_steps`` cuts off from its next one. Agents that ended take
    the action None at once. ``last()`` has to return the sum of ``env.rewards`` since
    the agent's turn.

    *Seeds.* An episode starts with ``reset(seed=…)``, given a seed from the
    environment's reset stream. `select` and `load_state_dict` replay the actions of an
    episode. This is exact if the environment is deterministic given the seed; otherwise
    `load_state_dict` warns.

    *State.* Training reads ``env.state()`` for ``critic=state`` only. Where that is the
    observations of all agents, one after another, as in mpe2, the state is a set with a
    token for each agent: its observation, padded with zeros to the longest one, with
    the type self for the agent whose value is estimated, and its group's name for the
    others. Any other state becomes the tokens that an observation of the environment's
    ``state_space`` does, or, without one, an array of that shape; the tokens are then
    the same for all agents. ``env.state_tokens`` has the options of these tokens:
    ``{slices: {ball: [0, 4], players: {start: 4, count: 5, features: 3}}}``.

    *Pictures* are the environment's own, with ``render_mode="rgb_array"``. They show no
    attention, because the positions of tokens in them are unknown.

    Source: PettingZoo's APIs (`Terry et al., 2021
    <https://arxiv.org/abs/2009.14471>`_).

    Args:
        module: a module with ``parallel_env`` such as ``mpe2.simple_spread_v3``, or
            else with ``env`` such as ``pettingzoo.classic.tictactoe_v3``;
            ``package.module:callable``, an id of PettingZoo's registry, which
            contains a slash, or ``package:id`` of Gymnasium's. It is imported.
        options: keyword arguments of the environment.
        tokenizer: a name of ``marl-pool list tokenizers`` or
            ``package.module:Class``; None selects the tokenizer registered for the
            module, or else ``features``, one token for each number.
        groups: names of agents by group; None groups agents of equal spaces whose names
            differ in a trailing number only.
        padding: ``zero_rows`` if rows of a matrix are padding where all their numbers
            are 0; None if all rows are tokens.
        presence: index of the feature that is 0 in rows of a matrix that are padding.
        presence_keys: by the path of a set in a Dict, the path of the entry that is 1
            where there is a token and 0 where there is none.
        padding_keys: the same for entries that are 1 where there is no token.
        slices: named ranges of a vector, ``[start, stop]`` for one token, or a mapping
            of ``start``, ``count``, ``features`` and perhaps ``presence`` for several.
        type_features: indices of the features of a matrix's row of which the largest
            one indicates the type.
        patch: height and width of an image's patches in pixels; None for the smallest
            that give no more than 64 tokens. If given, matrices are images.
        channels: axis of an image's channels.
        token_types: a name for each type, in their order, or for each row of a matrix.
            Equal names make one type; ``self`` names the observer's own tokens.
        signal_types: names of the types that matter for the task; the others are noise.
        positions: indices of the features that hold a token's position.
        max_tokens: number of slots that tokens are padded to; a Sequence needs it.
        drop: which elements of a longer Sequence are dropped, the ``last`` or the
            ``farthest`` by their ``positions``; None to refuse it.
        state_tokens: options of the tokens of ``env.state()``: any option of
            observations, and ``tokenizer``; None to choose by the state.
        max_steps: steps until truncation, unless the environment ends earlier.
        workers: processes that step the environments, at most one for each of them; 1
            for this process alone. Results are the same, to the bit.

    Raises:
        InputError: no such environment, rejected options, unsupported spaces, invalid
            groups, a tokenizer or options that do not fit the observations, or an
            environment that cannot be built in another process.
    """

    def __init__(
        self,
        num_envs: Episodes,
        *,
        module: str,
        options: dict[str, Any] | None = None,
        tokenizer: str | None = None,
        groups: dict[str, list[str]] | None = None,
        padding: Padding | dict[str, Padding] | None = None,
        presence: NonNegativeInt | dict[str, Presence] | None = None,
        presence_keys: dict[str, str | dict[str, str]] | None = None,
        padding_keys: dict[str, str | dict[str, str]] | None = None,
        slices: dict[str, Any] | None = None,
        type_features: Indices | dict[str, Indices] | None = None,
        patch: Size | dict[str, Size] | None = None,
        channels: Channels | dict[str, Channels] = "last",
        token_types: Names | dict[str, Names] | None = None,
        signal_types: Names | dict[str, Names] | None = None,
        positions: Indices | dict[str, Indices] | None = None,
        max_tokens: Size | dict[str, MaxTokens] | None = None,
        drop: Drop | dict[str, Drop] | None = None,
        state_tokens: dict[str, Any] | None = None,
        max_steps: Episodes = 1000,
        workers: Processes = 1,
        **common: Unpack[EnvOptions],
    ) -> None:
        # Simulators hold the teams, not this object, which would never be freed.
        self._teams: dict[str, PettingZooTeam] = {}
        self._build = partial(_build, module, dict(options or {}), self._teams)
        super().__init__(num_envs, build=self._build, max_steps=max_steps, **common)
        self.module, self.options = module, dict(options or {})
        self._state_options = check_state_tokens(state_tokens)
        # The first environment shows the spaces; the others are built at their reset.
        simulator = self._build()
        self._teams |= make_teams(simulator.env, groups)
        self.turn_based = any(team.turn_based for team in self._teams.values())
        self._number = np.float32 if self.dtype == torch.float32 else np.float64
        agents = tuple(map(str, simulator.env.possible_agents))
        by_option = {
            "padding": padding,
            "presence": presence,
            "presence_keys": presence_keys,
            "padding_keys": padding_keys,
            "slices": slices,
            "type_features": type_features,
            "patch": patch,
            "channels": channels,
            "token_types": token_types,
            "signal_types": signal_types,
            "positions": positions,
            "max_tokens": max_tokens,
            "drop": drop,
        }
        self._views = ViewMaker(
            self._teams,
            agents,
            module,
            self.options,
            tokenizer,
            by_option,
            self.device,
            self._number,
        ).make()
        self.groups = {
            name: AgentGroup(
                len(team.agents),
                self._views[name].spec,
                team.batched_action,
                has_action_masks=MASK in self._views[name].parts,
                view=None if self._views[name].shows_tokens else self._views[name],
            )
            for name, team in self._teams.items()
        }
        # Groups whose masks are in infos, which appear only after a reset.
        self._informed: frozenset[str] = frozenset()
        self._renderer = FrameRenderer(
            module, partial(self._build, render_mode="rgb_array")
        )
        empty = self._step_arrays(num_envs)
        self._set_tensors(empty.tensors(self.device, self.dtype))
        self._workers: EnvWorkers | None = None
        if (count := min(workers, num_envs)) == 1:
            self._spare.append(simulator)
            return
        env_options = {
            "module": module,
            "options": options,
            "tokenizer": tokenizer,
            "groups": groups,
            "dtype": self.dtype,
            **by_option,
        }
        # Two for each environment, which may have to be replayed before its step.
        places = 2 * num_envs
        arrays = self.shared_arrays(places)
        self._workers = EnvWorkers(count, places, arrays, env_options)
        self._new_simulator = self._workers.simulator

    @property
    def active(self) -> dict[str, Tensor]:
        """For each group, ``(num_envs, agents)`` bool: agents that act next."""
        return {name: self._state[f"{name}/active"] for name in self._teams}

    @property
    @override
    def alive(self) -> dict[str, Tensor]:
        part = "alive" if self.turn_based else "active"
        return {name: self._state[f"{name}/{part}"] for name in self._teams}

    @property
    @override
    def has_action_masks(self) -> bool:
        return super().has_action_masks or bool(self._informed)

    @override
    def observe(self) -> dict[str, Tokens]:
        observations, active = {}, self.active
        for name, view in self._views.items():
            parts = {part: self._state[f"{name}/{part}"] for part in view.parts}
            tokens = view.tokens(parts)
            if name in self._informed:
                tokens = with_action_mask(tokens, self._state[f"{name}/{MASK}"])
            padding = tokens.padding | ~active[name][..., None]
            observations[name] = tokens._replace(padding=padding)
        return observations

    @cached_property
    def _state_tokens(self) -> StateTokens:
        return StateTokens(
            self._build(),
            self._teams,
            self._state_options,
            self.device,
            self._number,
        )

    @property
    @override
    def state_specs(self) -> dict[str, TokenSpec]:
        return self._state_tokens.specs

    @override
    def observe_state(self) -> dict[str, Tokens]:
        steps = self._finished([self._state_of(row) for row in range(self.num_envs)])
        return self._state_tokens.read([step.state for step in steps], self.alive)

    def _state_of(self, row: int) -> ParallelStep:
        cursor = self._cursors[row]
        assert cursor is not None, "state before reset"
        if not cursor.in_sync:
            self._replay(row, cursor.prefix())
        simulator = self._cursors[row].simulator.inner  # type: ignore[union-attr]
        assert isinstance(simulator, ParallelSimulator | RemoteSimulator)
        return simulator.state()

    @override
    def at_limit(self) -> Tensor:
        return super().at_limit() | self._state[TRUNCATED]

    @override
    def __getstate__(self) -> dict[str, Any]:
        if self._workers is not None:
            raise InputError(
                "env.workers: expected 1 for an environment that is copied or pickled; "
                "select() copies one with workers, too"
            )
        state = super().__getstate__()
        state.pop("_state_tokens", None)
        return state

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        # Earlier revisions did not save it; saved episodes have not ended.
        none = torch.zeros(self.num_envs, dtype=torch.bool)
        tensors = {TRUNCATED: none, **state["tensors"]}
        super().load_state_dict({**state, "tensors": tensors})
        self._informed = frozenset(
            name
            for name, view in self._views.items()
            if f"{name}/{MASK}" in self._state and MASK not in view.parts
        )
        steps = self._replay_saved(state)
        finished = self._finished([*steps.values()])
        arrays = self._arrays_of(finished, [*steps], self.num_envs)
        replayed = arrays.tensors(self.device, self.dtype)
        if not all(
            np.array_equal(tensor.cpu(), self._state[key].cpu(), equal_nan=True)
            for key, tensor in replayed.items()
        ):
            warnings.warn(
                f"{self.module} is not deterministic: the same seeds and actions lead "
                "to other observations, so the run does not continue exactly",
                stacklevel=2,
            )

    @override
    def draw(
        self, index: int, size: int, weights: np.ndarray | None, group: str, agent: int
    ) -> np.ndarray:
        cursor = self._cursors[index]
        if cursor is None:
            raise InputError("an environment can be drawn once it has been reset")
        return self._renderer.render(cursor)

    @override
    def place(self, rows: Tensor, keys: Tensor) -> None:
        is_first = all(cursor is None for cursor in self._cursors)
        pairs = zip(rows.tolist(), reset_seeds(keys), strict=True)
        steps = self._finished(
            [self._replay(row, ActionLog(seed)) for row, seed in pairs]
        )
        self._find_masks(steps, is_first=is_first)
        arrays = self._arrays_of(steps, range(len(rows)), len(rows))
        state = {key: tensor.clone() for key, tensor in self._state.items()}
        for key, tensor in arrays.tensors(self.device, self.dtype).items():
            state[key][rows] = tensor
        self._set_tensors(state)

    def _find_masks(self, resets: Sequence[ParallelStep], *, is_first: bool) -> None:
        """Add storage of action masks for groups with masks in the infos of resets."""
        informed = {agent for step in resets for agent in step.masks}
        if informed and self.turn_based:  # other agents' masks appear in their turns
            choosing = (team for team in self._teams.values() if team.spec.sizes)
            informed |= {agent for team in choosing for agent in team.agents}
        for name, team in self._teams.items():
            if MASK in self._views[name].parts or informed.isdisjoint(team.agents):
                continue
            if name not in self._informed:
                if not team.spec.sizes:
                    raise InputError(
                        f"env.module: reset: group {name!r}: infos: expected no "
                        f"{MASK}, since its actions are not discrete"
                    )
                # Trajectories and memories have a mask in all steps or in none.
                if not is_first:
                    raise InputError(
                        f"env.module: reset: group {name!r}: infos: expected {MASK} "
                        "from the first reset on, got one later"
                    )
                # Other environments may be in episodes without masks.
                shape = (self.num_envs, len(team.agents), team.spec.num_options)
                allowed = torch.ones(shape, dtype=torch.bool, device=self.device)
                self._state[f"{name}/{MASK}"] = allowed
                self._informed |= {name}

    @override
    def advance(self, actions: Mapping[str, Tensor]) -> Advance:
        encoded = [
            team.encode(actions[name].detach().double().cpu().numpy())
            for name, team in self._teams.items()
        ]
        numbers = np.concatenate(encoded, axis=1)
        rows = range(self.num_envs)
        # A generator would replace an environment's StopIteration by a RuntimeError.
        steps = self._finished([self._step_one(row, numbers[row]) for row in rows])
        arrays = self._arrays_of(steps, rows, self.num_envs)
        # Move everything to the device at once.
        self._set_tensors(arrays.tensors(self.device, self.dtype))
        rewards = {
            name: torch.from_numpy(array).to(self.device, self.dtype)
            for name, array in arrays.rewards.items()
        }
        return rewards, torch.from_numpy(arrays.terminated).to(self.device)

    def new_simulator(self) -> Simulator[ParallelStep]:
        """Return a simulator that no environment uses."""
        return self._spare.pop() if self._spare else self._new_simulator()

    def shared_arrays(self, places: int) -> StepArrays:
        """Return arrays for any steps, with masks of all choices."""
        masked = {
            name
            for name, team in self._teams.items()
            if team.spec.sizes and MASK not in self._views[name].parts
        }
        return StepArrays(places, self._teams, self._views, self._number, masked)

    def _finished(self, steps: list[ParallelStep]) -> list[ParallelStep]:
        """Wait for the steps in other processes."""
        return steps if self._workers is None else self._workers.finish(steps)

    def _arrays_of(
        self, steps: Sequence[ParallelStep], rows: Sequence[int], count: int
    ) -> StepArrays:
        """Return arrays of ``count`` rows with steps at ``rows``."""
        arrays = self._step_arrays(count)
        if self._workers is not None:
            arrays.copy(rows, steps, self._workers.arrays)
            return arrays
        for row, step in zip(rows, steps, strict=True):
            arrays.write(row, step)
        return arrays

    def _step_arrays(self, num_envs: int) -> StepArrays:
        return StepArrays(
            num_envs, self._teams, self._views, self._number, self._informed
        )

    @override
    def _tensors(self) -> dict[str, Tensor]:
        return self._state

    @override
    def _set_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        self._state = dict(tensors)


def _build(
    module: str,
    options: Mapping[str, Any],
    teams: Mapping[str, PettingZooTeam],
    **rendering: str,
) -> ParallelSimulator:
    env = build_env(module, {**options, **rendering})
    return ParallelSimulator(env, partial(decode, teams))
