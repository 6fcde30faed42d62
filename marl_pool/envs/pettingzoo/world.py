"""Any PettingZoo parallel env as a batched world."""

import warnings
from collections.abc import Mapping
from typing import Any, Unpack

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from marl_pool.envs.base import AgentGroup, EnvOptions, Step
from marl_pool.envs.pettingzoo.agents import teams
from marl_pool.envs.pettingzoo.batch import Batch
from marl_pool.envs.pettingzoo.env_copy import Copy, Outcome, build_env
from marl_pool.envs.pettingzoo.observations import Sight, sight_of
from marl_pool.envs.pettingzoo.rendering import Camera, fitted
from marl_pool.envs.simulation.replay import History, Place, ReplayedEnv
from marl_pool.envs.tokenizers import fitting, make_tokenizer
from marl_pool.envs.tokenizers.base import Observer
from marl_pool.tokens import Tokens
from marl_pool.utils.errors import InputError
from marl_pool.utils.randomness import uniform
from marl_pool.utils.types import PositiveInt

SEEDS = 1 << 31
"""The env's resets are seeded below it."""


class PettingZooEnv(ReplayedEnv):
    """Copies of someone's PettingZoo parallel env, stepped as one batch.

    The copies step one after the other in Python, which is as fast as the env is; all
    that comes after them is batched. Flat observations are turned into tokens by a
    tokenizer; observations that are dicts of ``features``, ``types`` and ``padding``
    are tokens already.

    *Life and death.* Agents may come and go while the others go on. Who is not there
    has reward 0, only padding to see, and its action is ignored. An agent that
    terminates dies. So does one that is truncated while others go on: its value is
    not bootstrapped. When the last agents leave in one step, those that are truncated
    count as still alive and the world as truncated; if all of them terminate, the
    world is terminated.

    *Seeds.* Each episode is one ``reset(seed=…)``, with a seed from the world's reset
    stream. `select` and `load_state_dict` lead a copy to where it stood by repeating
    the actions of its episode; that is exact for an env that its seed determines.

    *Pictures* are the env's own, by ``render_mode="rgb_array"``; nothing is known
    about where tokens are, so attention is not drawn.

    Args:
        num_envs: copies of the env.
        module: a module with ``parallel_env`` such as ``mpe2.simple_spread_v3``,
            ``package.module:callable``, or an id of PettingZoo's registry, which has
            a slash. It is imported.
        options: keyword arguments of the env.
        tokenizer: a name of ``marl-pool list tokenizers`` or
            ``package.module:Class``; None for the one that is known to fit the
            module, or else ``features``, one token for each number.
        groups: names of agents by group; None for agents of equal spaces whose names
            differ in a trailing number only.
        max_steps: steps until truncation, if the env does not end before.

    Raises:
        InputError: no such env, options that it refuses, spaces or groups that don't
            fit, or a tokenizer that does not fit the observations.
    """

    simulated = True

    def __init__(
        self,
        num_envs: PositiveInt,
        *,
        module: str,
        options: dict[str, Any] | None = None,
        tokenizer: str | None = None,
        groups: dict[str, list[str]] | None = None,
        max_steps: PositiveInt = 1000,
        **common: Unpack[EnvOptions],
    ) -> None:
        super().__init__(
            num_envs,
            max_steps=max_steps,
            **common,
        )
        self.module, self.options = module, dict(options or {})
        # The first copy, which tells the spaces; the others are built when reset.
        first = build_env(module, self.options)
        self._spare = [first]
        self._teams = teams(first, groups)
        self._number = np.float32 if self.dtype == torch.float32 else np.float64
        everyone = tuple(map(str, first.possible_agents))
        self._sights = {
            name: self._sight(name, everyone, tokenizer) for name in self._teams
        }
        self._groups = {
            name: AgentGroup(len(team.agents), self._sights[name].spec, team.action)
            for name, team in self._teams.items()
        }
        self._camera = Camera(module, self.options, self._decode)
        self._places: list[Place | None] = [None] * num_envs
        self._set_tensors(self._batch(num_envs).tensors(self.device, self.dtype))

    @property
    def groups(self) -> dict[str, AgentGroup]:
        """As the option ``groups`` says."""
        return self._groups

    @property
    def active(self) -> dict[str, Tensor]:
        """Who is there; see the class."""
        return {name: self._state[f"{name}/living"] for name in self._teams}

    def observe(self) -> dict[str, Tokens]:
        """Tokens of all agents; who is not there has only padding."""
        return {name: self._tokens(name) for name in self._teams}

    def step(self, actions: Mapping[str, Tensor]) -> Step:
        """Advance every copy; see `BatchedEnv.step`."""
        step = super().step(actions)
        return step._replace(truncated=step.truncated | self._truncated)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where ``state`` was taken, by repeating its actions.

        Warns if the env does not come to the same observations.
        """
        super().load_state_dict(state)
        batch = self._batch(self.num_envs)
        for row, saved in enumerate(state["histories"]):
            if saved is not None:
                seed, actions = saved
                place, outcome = self._begin(row, History(seed, list(actions)))
                self._places[row] = place
                batch.record(row, outcome)
        replayed = batch.tensors(self.device, self.dtype)
        if not all(_same(replayed[key], self._state[key]) for key in replayed):
            warnings.warn(
                f"{self.module} is not deterministic: after the same seeds and actions "
                "it shows something else, so what is resumed is not exact",
                stacklevel=2,
            )

    def frame(
        self,
        index: int = 0,
        *,
        attention: Tensor | None = None,
        group: str | None = None,
        agent: int = 0,
        size: int = 512,
    ) -> np.ndarray:
        """Draw world ``index``; see `BatchedEnv.frame`. Attention is not drawn.

        Raises:
            InputError: the env cannot be drawn, or was never reset.
        """
        place = self._places[index]
        if place is None:
            raise InputError("a world can be drawn once it has been reset")
        return fitted(self._camera.show(place), size)

    def _place(self, rows: Tensor, keys: Tensor) -> None:
        seeds = (uniform(keys, 1)[:, 0] * SEEDS).long().tolist()
        batch = self._batch(len(rows))
        for i, (row, seed) in enumerate(zip(rows.tolist(), seeds, strict=True)):
            self._places[row], outcome = self._begin(row, History(seed))
            batch.record(i, outcome)
        fresh = batch.tensors(self.device, self.dtype)
        state = {key: tensor.clone() for key, tensor in self._state.items()}
        for key, tensor in fresh.items():
            state[key][rows] = tensor
        self._set_tensors(state)

    def _advance(
        self, actions: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], Tensor]:
        batch = self._batch(self.num_envs)
        for row, chosen in enumerate(self._encode(actions)):
            place = self._places[row]
            assert place is not None, "step before reset"
            if not place.current:  # another world went on with the copy
                place, _ = self._begin(row, place.past())
            batch.record(row, place.copy.step(chosen))
            self._places[row] = place.moved()
        self._set_tensors(batch.tensors(self.device, self.dtype))
        self._truncated = torch.from_numpy(batch.truncated).to(self.device)
        rewards = {
            name: torch.from_numpy(array).to(self.device, self.dtype)
            for name, array in batch.rewards.items()
        }
        return rewards, torch.from_numpy(batch.terminated).to(self.device)

    def _begin(self, row: int, history: History) -> tuple[Place, Outcome]:
        """Lead the row's own copy, or a fresh one, to the end of ``history``."""
        place = self._places[row]
        if place is not None and place.current:
            copy = place.copy
        else:
            spare = self._spare
            env = spare.pop() if spare else build_env(self.module, self.options)
            copy = Copy(env, self._decode)
        outcome = copy.begin(history)
        return Place(copy, history, len(history.actions)), outcome

    def _encode(self, actions: Mapping[str, Tensor]) -> np.ndarray:
        """All actions of each world in a row, clipped to their spaces."""
        parts = []
        for name, team in self._teams.items():
            part = actions[name].detach().double().cpu().numpy()
            if isinstance(team.action, spaces.Box):
                part = part.clip(team.action.low, team.action.high)
            parts.append(part.reshape(self.num_envs, -1))
        return np.concatenate(parts, axis=1)

    def _decode(self, row: np.ndarray) -> dict[Any, Any]:
        """A row of `_encode` as the action of each agent."""
        chosen: dict[Any, Any] = {}
        for team in self._teams.values():
            size = len(team.agents) * team.action_size
            own, row = row[:size], row[size:]
            shaped = own.reshape(len(team.agents), -1)
            chosen |= zip(team.agents, team.decode(shaped), strict=True)
        return chosen

    def _sight(
        self, group: str, everyone: tuple[str, ...], tokenizer: str | None
    ) -> Sight:
        team, made = self._teams[group], None
        name = tokenizer or fitting(self.module)
        if isinstance(team.observation, spaces.Box):
            agents = tuple(map(str, team.agents))
            size = team.observation.shape[0]
            observer = Observer(
                group, agents, everyone, size, self.options, self.device
            )
            made = make_tokenizer(name, observer)
        elif tokenizer is not None:
            raise InputError(
                f"env.tokenizer: group {group!r} observes tokens already; "
                f"expected null, got {tokenizer!r}"
            )
        return sight_of(team, made, name, self._number)

    def _batch(self, num_envs: int) -> Batch:
        return Batch(num_envs, self._teams, self._sights, self._number)

    def _tokens(self, name: str) -> Tokens:
        prefix = f"{name}/"
        seen = {
            key.removeprefix(prefix): tensor
            for key, tensor in self._state.items()
            if key.startswith(prefix)
        }
        living = seen.pop("living")
        tokens = self._sights[name].tokens(seen)
        return tokens._replace(padding=tokens.padding | ~living[..., None])

    def _tensors(self) -> dict[str, Tensor]:
        return self._state

    def _set_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        self._state = dict(tensors)


def _same(mine: Tensor, theirs: Tensor) -> bool:
    """Whether two tensors are equal, NaN to NaN."""
    both = mine.cpu().numpy(), theirs.cpu().numpy()
    return np.array_equal(*both, equal_nan=True)
