"""Perturbation of any env whose observations are tokens."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from pettingzoo import ParallelEnv
from pettingzoo.utils import BaseParallelWrapper
from torch import Tensor
from typing_extensions import override

from marl_pool.api.tokenize import (
    Observation,
    ParallelTokenObservation,
    TokenObservation,
    read_observation,
    unknown_env,
)
from marl_pool.envs.base import BatchedEnv
from marl_pool.envs.pettingzoo.teams import by_name
from marl_pool.envs.views import ParallelView
from marl_pool.finite import validate_finite
from marl_pool.observations.make import split_action_mask
from marl_pool.observations.masks import MASK, read_mask
from marl_pool.observations.parts import as_array, summary_of
from marl_pool.observations.token_dict import TOKEN_PARTS, TokenDictView, token_spec
from marl_pool.options.signatures import check_argument
from marl_pool.options.types import Seed
from marl_pool.perturbations import make_perturbation, perturbation_names
from marl_pool.perturbations.actions import ActionPerturbation
from marl_pool.perturbations.base import (
    Perturbation,
    PerturbationState,
    validate_constructed,
)
from marl_pool.perturbations.turns import EveryStep, OwnTurns, validate_groups
from marl_pool.policies.action_spaces import ActionRows, Selection
from marl_pool.policies.actions import ActionSpec
from marl_pool.policies.masks import validate_mask_space
from marl_pool.policies.selection import SelectedTokens
from marl_pool.tokens import Tokens, TokenSpec
from marl_pool.utils.errors import InputError
from marl_pool.utils.randomness import Purpose, stream_keys
from marl_pool.utils.text import single_line

ALONE = "agent"
"""Name of the agent of a Gymnasium env, and of its group."""


def perturb_env(
    env: Any, perturbation: Perturbation | Mapping[str, Any] | str, seed: int = 0
) -> "PerturbedParallelEnv | PerturbedEnv":
    """Wrap an env so that its observations, or the actions it executes, are perturbed.

    For an environment of this package, the observations equal the ones of a
    `Rollout` of the same environment and seed. Where agents take turns, only an agent's
    own turns count as its steps.

    Observations keep their dtypes, except that features of integers become float32,
    unless they are bytes up to 255.

    Args:
        env: a PettingZoo ``ParallelEnv`` or a Gymnasium ``Env`` whose observations are
            dicts of ``features`` ``(N, F)``, ``types`` and ``padding`` ``(N,)``, and an
            ``action_mask`` if there is one, which perturbed actions obey.
        perturbation: a `Perturbation`, its name, or ``{"name": …, **options}``.
        seed: seed of the perturbation, until ``reset(seed=…)`` sets another.

    Raises:
        InputError: observations of a different form, an invalid perturbation, or one of
            actions whose space `ActionRows` rejects.
    """
    if isinstance(env, gymnasium.Env):
        return PerturbedEnv(env, perturbation, seed)
    if isinstance(env, ParallelEnv):
        return PerturbedParallelEnv(env, perturbation, seed)
    raise unknown_env(env)


class PerturbedParallelEnv(BaseParallelWrapper[Any, Observation, Any]):
    """A PettingZoo env with perturbed observations; see `perturb_env`.

    Agents whose names differ only in a trailing number form a group. Each agent of a
    group has its own random numbers.
    """

    def __init__(
        self,
        env: ParallelEnv[Any, Any, Any],
        perturbation: Perturbation | Mapping[str, Any] | str,
        seed: int = 0,
    ) -> None:
        super().__init__(env)
        observation_spaces = {
            agent: env.observation_space(agent) for agent in env.possible_agents
        }
        view = _view(env)
        groups = by_name(env, list(observation_spaces))
        # An environment's own groups may have other names, unless a wrapper has renamed
        # its agents, or left some out.
        is_ours = isinstance(view, ParallelView)
        if is_ours and view.possible_agents == [*observation_spaces]:
            groups = view.members
        self._perturber = Perturber(
            env, perturbation, groups, observation_spaces, env.action_space, seed
        )
        self.observation_spaces = dict(self._perturber.spaces)

    @override
    def observation_space(self, agent: Any) -> spaces.Dict:
        return self._perturber.spaces[agent]

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[Any, Observation], dict[Any, dict[str, Any]]]:
        """Begin the next episode, or the first one of ``seed``."""
        observations, infos = self.env.reset(seed=seed, options=options)
        return self._perturber.begin(observations, infos, seed), infos

    @override
    def step(self, actions: dict[Any, Any]) -> Any:
        observations, *outcome, infos = self.env.step(self._perturber.act(actions))
        return self._perturber.observe(observations, infos), *outcome, infos


class PerturbedEnv(
    gymnasium.Wrapper[Observation, Any, Observation, Any],
    gymnasium.utils.RecordConstructorArgs,
):
    """A Gymnasium env with perturbed observations; see `perturb_env`.

    ``gymnasium.make(env.spec)`` creates an equal one.
    """

    def __init__(
        self,
        env: gymnasium.Env[Any, Any],
        perturbation: Perturbation | Mapping[str, Any] | str,
        seed: int = 0,
    ) -> None:
        gymnasium.utils.RecordConstructorArgs.__init__(
            self, perturbation=perturbation, seed=seed
        )
        gymnasium.Wrapper.__init__(self, env)
        view, observation_spaces = _view(env), {ALONE: env.observation_space}
        is_ours = isinstance(view, ParallelView)
        groups = {name: [ALONE] for name in (view.members if is_ours else [ALONE])}
        self._perturber = Perturber(
            env,
            perturbation,
            groups,
            observation_spaces,
            lambda _: env.action_space,
            seed,
        )
        self.observation_space = self._perturber.spaces[ALONE]

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Begin the next episode, or the first one of ``seed``."""
        observation, info = self.env.reset(seed=seed, options=options)
        observations = self._perturber.begin({ALONE: observation}, {ALONE: info}, seed)
        return observations[ALONE], info

    @override
    def step(self, action: Any) -> Any:
        executed = self._perturber.act({ALONE: action})[ALONE]
        observation, *outcome, info = self.env.step(executed)
        observations = self._perturber.observe({ALONE: observation}, {ALONE: info})
        return observations[ALONE], *outcome, info


class Perturber:
    """A perturbation applied to the observations and actions of one env.

    Args:
        env: the env; a view of a `BatchedEnv` gives the tokens' specs.
        perturbation: see `perturb_env`.
        groups: names of the agents in each group.
        observation_spaces: space of each agent's observations.
        actions: returns an agent's action space.
        seed: seed of the perturbation.

    Attributes:
        spaces: space of each agent's perturbed observations.
    """

    def __init__(
        self,
        env: Any,
        perturbation: Perturbation | Mapping[str, Any] | str,
        groups: Mapping[str, Sequence[Any]],
        observation_spaces: Mapping[Any, spaces.Space[Any]],
        actions: Callable[[Any], spaces.Space[Any]],
        seed: int,
    ) -> None:
        check_argument("seed", seed, Seed)
        self.groups = {name: list(agents) for name, agents in groups.items()}
        self.view = _view(env)
        token_spaces: dict[Any, spaces.Space[Any]] = {}
        self.masks: dict[Any, spaces.Space[Any] | None] = {}
        for agent, space in observation_spaces.items():
            token_spaces[agent], self.masks[agent] = split_action_mask(space)
        self.specs = self._read_specs(env, token_spaces)
        # Check the options of the perturbation against the tokens' specs.
        self.perturbation = _perturbation(perturbation, self.specs)
        counts = {name: len(agents) for name, agents in self.groups.items()}
        validate_groups(self.perturbation, counts, None)
        # Observations keep their dtypes, but noise needs floats or all bytes.
        self.dtypes = {
            agent: {part: space[part].dtype for part in TOKEN_PARTS}  # type: ignore[index]
            for agent, space in token_spaces.items()
        }
        for name, agents in self.groups.items():
            for agent in agents:
                if self.dtypes[agent]["features"].kind != "f":
                    self.dtypes[agent]["features"] = np.dtype(self.specs[name].dtype)
        self.token_views = {
            agent: TokenDictView(space, self.dtypes[agent]["features"])
            for agent, space in token_spaces.items()
        }
        of_actions = isinstance(self.perturbation, ActionPerturbation)
        spaces_by_group = {
            name: actions(agents[0]) for name, agents in self.groups.items()
        }
        self.rows = {
            name: ActionRows(space)
            for name, space in spaces_by_group.items()
            if self.perturbation.covers(name)
            and (of_actions or isinstance(space, Selection))
        }
        selections = {
            name: SelectedTokens(self.specs[name], ActionSpec.of_rows(rows))
            for name, rows in self.rows.items()
            if isinstance(rows.space, Selection)
        }
        turn_based = self.batched is not None and self.batched.turn_based
        kind = OwnTurns if turn_based else EveryStep
        self.perturbations: dict[str, EveryStep] = {
            name: kind(
                self.perturbation.for_group(name),
                partial(self._acting, name),
                partial(self._streams, name),
                selections.get(name),
            )
            for name in self.groups
            if self.perturbation.covers(name)
        }
        self.perceived: dict[str, Tokens] = {}
        for name in self.rows:
            agent = self.groups[name][0]
            validate_mask_space(
                observation_spaces[agent], actions(agent), f"env: agent {agent!r}"
            )
        # Episodes are counted since the last seed, and since construction for ramps.
        self.seed, self.episode, self.played = seed, -1, -1
        self.steps = 0
        self.keys: dict[str, Tensor] = {}
        self.states: dict[str, PerturbationState] = {}
        self.spaces: dict[Any, spaces.Dict] = {}
        for name, agents in self.groups.items():
            count = self._perceived_tokens(name)
            self.spaces |= {agent: self._space(name, agent, count) for agent in agents}

    def _read_specs(
        self, env: Any, token_spaces: Mapping[Any, spaces.Space[Any]]
    ) -> dict[str, TokenSpec]:
        """Describe the tokens of each group, from the space of its first agent."""
        env_groups = {} if self.batched is None else self.batched.groups
        token_specs = _token_specs(env)
        specs: dict[str, TokenSpec] = {}
        for name, (agent, *_) in self.groups.items():
            spec = token_spec(token_spaces[agent])
            if spec is None:
                raise InputError(
                    f"env: agent {agent!r}: expected observations in a Dict of "
                    f"{', '.join(TOKEN_PARTS)}, as tokenize_env makes, got "
                    f"{' '.join(str(token_spaces[agent]).split())}"
                )
            # A space cannot name token types, but these envs can.
            spec = token_specs.get(agent, spec)
            if name in env_groups:
                spec = replace(env_groups[name].tokens, num_tokens=spec.num_tokens)
            specs[name] = spec
        return specs

    @property
    def batched(self) -> BatchedEnv | None:
        """The environment of this package behind the view; a seed replaces it."""
        env = getattr(self.view, "env", None)
        return env if isinstance(env, BatchedEnv) else None

    def act(self, actions: Mapping[Any, Any]) -> dict[Any, Any]:
        """Perturb the actions of the present agents in one step.

        Raises:
            InputError: before the first reset; an action of another form than its
                space, or one that is not finite.
        """
        if not self.states:
            raise InputError("Cannot call env.step() before calling env.reset()")
        executed = dict(actions)
        for name, rows in self.rows.items():
            agents, spec = self.groups[name], ActionSpec.of_rows(rows)
            box = rows.space if isinstance(rows.space, spaces.Box) else None
            flat = {
                agent: rows.flatten(actions[agent])
                if box is None
                else _read_box(box, actions[agent], f"env: agent {agent!r}: action")
                for agent in agents
                if agent in actions
            }
            # Absent agents do nothing.
            no_action = np.zeros(spec.shape, np.int64 if spec.integral else np.float32)
            stacked = np.stack([flat.get(agent, no_action) for agent in agents])[None]
            tensor = torch.from_numpy(stacked)
            changed, self.states[name] = self.perturbations[name].act(
                tensor, self.states[name], spec, self.perceived[name]
            )
            for agent, row in zip(agents, changed[0].numpy(), strict=True):
                if agent in executed:
                    executed[agent] = (
                        rows.restore(row)
                        if box is None
                        else _restore_box(box, row, actions[agent])
                    )
        return executed

    def begin(
        self,
        observations: Mapping[Any, Observation],
        infos: Mapping[Any, Any],
        seed: int | None,
    ) -> dict[Any, Observation]:
        """Begin an episode, and perturb its first observations.

        A ``seed`` that was passed to ``reset`` restarts the count of episodes.
        """
        self.episode += 1
        if seed is not None:
            check_argument("seed", seed, Seed)
            self.episode, self.seed = 0, int(seed)
        self.played += 1
        self.steps = 0
        env_id, episode = torch.tensor([[0], [self.episode]])
        if self.batched is not None:
            # Options of the environment may number both from elsewhere.
            env_id, episode = self.batched.env_ids.cpu(), self.batched.episodes.cpu()
        for number, name in enumerate(self.groups):
            tokens = self._tokens(name, observations, infos)
            keys = stream_keys(self.seed, env_id, episode, Purpose.PERTURBATION, number)
            self.keys[name] = keys
            if name in self.perturbations:
                self.states[name] = self.perturbations[name].start(tokens)
        return self._perceive(observations, infos)

    def observe(
        self, observations: Mapping[Any, Observation], infos: Mapping[Any, Any]
    ) -> dict[Any, Observation]:
        """Perturb the observations of the present agents after a step."""
        self.steps += 1
        return self._perceive(observations, infos)

    def _acting(self, name: str) -> Tensor:
        """Return which agents of a group have a turn, ``(1, agents)`` bool."""
        assert self.batched is not None
        return self.batched.active[name].cpu()

    def _streams(self, name: str) -> tuple[Tensor, Tensor]:
        """Return the key of a group's stream, and the number of episodes played."""
        return self.keys[name], torch.tensor([self.played])

    def _perceive(
        self, observations: Mapping[Any, Observation], infos: Mapping[Any, Any]
    ) -> dict[Any, Observation]:
        new_observations: dict[Any, Observation] = {}
        for name, agents in self.groups.items():
            tokens = self._tokens(name, observations, infos)
            perturbation = self.perturbations.get(name)
            if perturbation is not None:
                tokens, self.states[name] = perturbation.perceive(
                    tokens, self.states[name]
                )
                self.perceived[name] = tokens
            selects = perturbation is not None and perturbation.selection is not None
            # Under padding a type may be negative, which the space need not allow.
            tokens = tokens._replace(types=tokens.types.clamp(min=0))
            for i, agent in enumerate(agents):
                parts = tokens.at((0, i)).columns
                new_observations[agent] = {
                    part: parts[part].numpy().astype(dtype)
                    for part, dtype in self.dtypes[agent].items()
                }
                if agent in observations and MASK in observations[agent]:
                    mask = observations[agent][MASK]
                    if selects:
                        # Tokens that were added have no option in the space.
                        mask = parts[MASK][: len(mask)].numpy().astype(mask.dtype)
                    new_observations[agent][MASK] = mask
        return {agent: new_observations[agent] for agent in observations}

    def _tokens(
        self,
        name: str,
        observations: Mapping[Any, Observation],
        infos: Mapping[Any, Any],
    ) -> Tokens:
        """Stack a group's tokens, ``(1, agents, …)``; absent agents are padding."""
        spec, agents = self.specs[name], self.groups[name]
        dtype = self.dtypes[agents[0]]["features"]
        blank = {
            "features": np.zeros((spec.num_tokens, spec.num_features), dtype),
            "types": np.zeros(spec.num_tokens, np.int64),
            "padding": np.ones(spec.num_tokens, np.bool_),
        }
        rows = [
            self._read(agent, observations[agent]) if agent in observations else blank
            for agent in agents
        ]
        stacked = {
            part: np.stack([row[part] for row in rows])[None] for part in TOKEN_PARTS
        }
        tokens = Tokens(**{k: torch.from_numpy(v) for k, v in stacked.items()})
        tokens = tokens._replace(
            types=tokens.types.long(), padding=tokens.padding.bool()
        )
        steps = torch.tensor([self.steps])
        batch = tokens.map(lambda part: part[None])
        validate_finite(name, batch, env_ids=torch.zeros_like(steps), first_steps=steps)
        return tokens._replace(action_mask=self._mask(name, observations, infos))

    def _read(self, agent: Any, observation: Any) -> Observation:
        """Return an agent's arrays, checked against its space except for padding."""
        view, where = self.token_views[agent], f"env: agent {agent!r}"
        arrays = read_observation(view, observation, where)
        features = arrays["features"].astype(self.dtypes[agent]["features"])
        return {
            part: array[0] for part, array in (arrays | {"features": features}).items()
        }

    def _mask(
        self,
        name: str,
        observations: Mapping[Any, Observation],
        infos: Mapping[Any, Any],
    ) -> Tensor | None:
        """Stack the action masks of a group whose actions are perturbed."""
        if name not in self.rows:
            return None
        sizes, masks = self.rows[name].sizes, {}
        for agent in self.groups[name]:
            sources = observations.get(agent, {}), infos.get(agent, {})
            mask = next((source[MASK] for source in sources if MASK in source), None)
            if mask is not None:
                masks[agent] = read_mask(mask, sizes, f"env: agent {agent!r}: {MASK}")
        if not masks:
            return None
        allowed = np.ones(sum(sizes), np.bool_)
        rows = [masks.get(agent, allowed) for agent in self.groups[name]]
        return torch.from_numpy(np.stack(rows)[None])

    def _perceived_tokens(self, name: str) -> int:
        """Return the number of tokens that a group's agents perceive."""
        if not self.perturbation.covers(name):
            return self.specs[name].num_tokens
        tokens = self._tokens(name, {}, {})
        tokens = tokens._replace(padding=torch.zeros_like(tokens.padding))
        perturbation = self.perturbation.for_group(name)
        start = perturbation.start(tokens, torch.zeros(1, dtype=torch.int64))
        return perturbation(tokens, start)[0].num_tokens

    def _space(self, name: str, agent: Any, count: int) -> spaces.Dict:
        """Return the space of an agent's observations of ``count`` tokens."""
        spec, dtypes = self.specs[name], self.dtypes[agent]
        # Noise is unbounded, except that bytes stay bytes.
        low, high = (0, 255) if spec.dtype == "uint8" else (-np.inf, np.inf)
        space = spaces.Dict(
            features=spaces.Box(
                low, high, (count, spec.num_features), dtypes["features"]
            ),
            types=spaces.Box(0, spec.num_types - 1, (count,), dtypes["types"]),
            padding=spaces.Box(0, 1, (count,), dtypes["padding"]),
        )
        if (mask := self.masks[agent]) is not None:
            space[MASK] = mask
        return space


def _view(env: Any) -> Any:
    """Return the innermost env; behind a view of one agent, the view of all agents."""
    return getattr(env.unwrapped, "view", env.unwrapped)


def _read_box(space: spaces.Box, action: Any, where: str) -> np.ndarray:
    """Return an action of a Box as floats, perhaps out of range.

    Raises:
        InputError: another shape, or values that are not finite numbers.
    """
    array = as_array(action)
    if (
        array is None
        or array.shape != space.shape
        or array.dtype.kind not in "biuf"
        or not np.isfinite(array).all()
    ):
        expected = single_line(space)
        raise InputError(f"{where}: expected {expected}, got {summary_of(action)}")
    return array if array.dtype.kind == "f" else array.astype(np.float64)


def _restore_box(space: spaces.Box, row: np.ndarray, action: Any) -> np.ndarray:
    """Return an executed action, in the dtype of a float array or else of the space."""
    dtype = np.asarray(action).dtype
    if dtype.kind == "f":
        return row.astype(dtype)
    rounded = np.rint(row) if np.issubdtype(space.dtype, np.integer) else row
    return rounded.astype(space.dtype)


def _token_specs(env: Any) -> Mapping[Any, TokenSpec]:
    """Return the specs by agent of an env from `tokenize_env`, wrapped or not."""
    while not isinstance(env, TokenObservation | ParallelTokenObservation):
        if not hasattr(env, "env"):
            return {}
        env = env.env
    if isinstance(env, TokenObservation):
        return {ALONE: env.token_spec}
    return env.token_specs


def _perturbation(
    perturbation: Perturbation | Mapping[str, Any] | str,
    specs: Mapping[str, TokenSpec],
) -> Perturbation:
    if isinstance(perturbation, str):
        perturbation = {"name": perturbation}
    if isinstance(perturbation, Mapping) and isinstance(perturbation.get("name"), str):
        if "specs" in perturbation:
            raise InputError(
                "perturbation.specs: expected none, since the env has them"
            )
        perturbation = make_perturbation(specs=specs, **perturbation)
    if not isinstance(perturbation, Perturbation):
        raise InputError(
            'perturbation: expected a Perturbation, a name, or {"name": …, **options}, '
            f"got {perturbation!r}; choose from {', '.join(perturbation_names())}"
        )
    validate_constructed(perturbation)
    return perturbation
