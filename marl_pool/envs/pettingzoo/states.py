"""The state of PettingZoo environments as tokens."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from marl_pool.envs.pettingzoo.env_copy import ParallelSimulator
from marl_pool.envs.pettingzoo.teams import PettingZooTeam
from marl_pool.envs.pettingzoo.views import TokenizedView
from marl_pool.envs.tokenizers import make_tokenizer
from marl_pool.envs.tokenizers.base import Observer, Slot, SlotTokenizer
from marl_pool.observations.make import make_view, validate_space
from marl_pool.observations.parts import as_array
from marl_pool.observations.view import TokenOptions, TokenView
from marl_pool.options.signatures import check_settings
from marl_pool.tokens import SELF_TYPE, Tokens
from marl_pool.utils.errors import InputError

KEY = "env.state_tokens"
"""The option that describes the tokens."""
SELF = "self"


class StateTokens:
    """Conversion of states of ``env.state()`` to tokens for each agent.

    Without options, a vector that concatenates the observations of all agents, as in
    mpe2, becomes a set with a token for each agent: its observation, padded with zeros
    to the longest one. The type of a token is self for the agent itself, and the name
    of the group for the others; agents that are gone are padding. Any other state
    becomes the tokens that an observation of its space does, which are the same for all
    agents.

    Args:
        simulator: an environment, which is reset.
        teams: the teams by group.
        options: result of `check_state_tokens`.
        device: device of the tokens.
        number: NumPy dtype of floats.

    Attributes:
        specs: specifications of the tokens by group.

    Raises:
        UnfitTokensError: an environment without ``state()``.
        InputError: a state that is neither numbers nor of a ``state_space``, or options
            that do not fit.
    """

    def __init__(
        self,
        simulator: ParallelSimulator,
        teams: Mapping[str, PettingZooTeam],
        options: Mapping[str, Any] | None,
        device: torch.device,
        number: Any,
    ) -> None:
        self.teams, self.device, self.number = teams, device, number
        observed = simulator.reset(0).observations
        state = simulator.state().state
        agents = simulator.env.possible_agents
        vectors = [as_array(observed.get(agent)) for agent in agents]
        self.space = _space(simulator.env.unwrapped, state)
        self.order: list[tuple[str, int]] | None = None
        """Group and number of the agent of each token, if it is an observation."""
        if options is None and _is_concatenation(state, vectors):
            by_agent = {
                agent: (name, number)
                for name, team in teams.items()
                for number, agent in enumerate(team.agents)
            }
            self.order = [by_agent[agent] for agent in agents]
            sizes = [len(vector) for vector in vectors if vector is not None]
            self.view = self._view_of_agents(sizes)
        else:
            self.view = self._view(dict(options or {}))
        self.specs = dict.fromkeys(teams, self.view.spec)

    def _view(self, options: dict[str, Any]) -> TokenView:
        name = options.pop("tokenizer", "features")

        def view_of_vector(space: spaces.Box | spaces.MultiBinary) -> TokenView:
            observer = self._observer((space.shape or ())[0])
            tokenizer = make_tokenizer(name, observer, f"{KEY}.tokenizer")
            return TokenizedView(space, tokenizer, name, self.number)

        return make_view(
            self.space,
            TokenOptions(**options),
            number=self.number,
            vector=view_of_vector,
            where="env.module: state()",
            prefix=f"{KEY}.",
        )

    def _view_of_agents(self, sizes: Sequence[int]) -> TokenView:
        assert self.order is not None
        width, stops = max(sizes), np.cumsum(sizes).tolist()
        slots = []
        for (name, _), size, stop in zip(self.order, sizes, stops, strict=True):
            places = [*range(stop - size, stop), *[None] * (width - size)]
            slots.append(Slot(name, tuple(places)))
        if SELF in self.teams:
            raise InputError(
                f"env.groups: expected names other than {SELF!r}, the type of the "
                "agent itself in a state, got one of that name"
            )
        observer, names = self._observer(stops[-1]), (SELF, *self.teams)
        tokenizer = SlotTokenizer(observer, names, slots)
        return TokenizedView(self.space, tokenizer, "agents", self.number)  # type: ignore[arg-type]

    def _observer(self, size: int) -> Observer:
        agents = [str(agent) for team in self.teams.values() for agent in team.agents]
        return Observer("state", tuple(agents), tuple(agents), size, {}, self.device)

    def read(
        self, states: Sequence[Any], alive: Mapping[str, Tensor]
    ) -> dict[str, Tokens]:
        """Convert one state of each environment.

        Args:
            states: results of ``env.state()``.
            alive: for each group, ``(num_envs, agents)`` bool.

        Returns:
            For each group, tokens with batch dimensions ``(num_envs, agents)``.

        Raises:
            InputError: a state of another shape or dtype than that after the reset, or
                a number that its space does not contain.
        """
        arrays = self.view.arrays(len(states))
        where = "env.module: state()"
        for row, state in enumerate(states):
            try:
                self.view.write(arrays, row, state)
            except (InputError, LookupError, TypeError, ValueError) as error:
                raise InputError(f"{where}: {error}") from error
        misfit = self.view.misfit(arrays, np.ones(len(states), np.bool_))
        if misfit is not None:
            raise InputError(f"{where}: {misfit.message}")
        parts = {
            key: torch.from_numpy(part).to(self.device) for key, part in arrays.items()
        }
        tokens = self.view.tokens(parts)
        numbers = tokens.features.masked_fill(tokens.padding[..., None], 0)
        if tokens.features.is_floating_point() and not numbers.isfinite().all():
            raise InputError(f"{where}: expected finite numbers, got NaN or infinity")
        by_group = {}
        for name, team in self.teams.items():
            count = len(team.agents)
            # Repeat, not expand: each agent gets separate marks below.
            by_group[name] = tokens.map(
                lambda part, n=count: part[:, None].repeat(  # type: ignore[misc]
                    1, n, *[1] * (part.dim() - 1)
                )
            )
            if self.order is not None:
                self._mark_agents(name, by_group[name], alive)
        return by_group

    def _mark_agents(
        self, group: str, tokens: Tokens, alive: Mapping[str, Tensor]
    ) -> None:
        """Write types and padding of tokens that are agents, as a group sees them."""
        assert self.order is not None
        for token, (name, number) in enumerate(self.order):
            tokens.padding[:, :, token] = ~alive[name][:, number, None]
            if name == group:
                tokens.types[:, number, token] = SELF_TYPE
                tokens.padding[:, number, token] = False


def check_state_tokens(options: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Check the keys and types of the options of `StateTokens`."""
    if options is None:
        return None
    fields = {key: value for key, value in options.items() if key != "tokenizer"}
    return {**options, **check_settings(TokenOptions, fields, KEY)}


def _space(env: Any, state: Any) -> spaces.Space[Any]:
    """Return the declared space of a state, or else of all arrays of its form."""
    declared = getattr(env, "state_space", None)
    if isinstance(declared, spaces.Space) and declared.contains(state):
        return declared
    array = as_array(state)
    if array is None or array.dtype.kind not in "biuf":
        raise InputError(
            "env.module: expected state() to return an array of numbers, or a state of "
            f"the environment's state_space, got {type(state).__name__}"
        )
    low, high, dtype = -np.inf, np.inf, array.dtype
    if dtype == np.bool_:
        return spaces.MultiBinary(array.shape)
    if dtype.kind in "iu":
        low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    space = spaces.Box(low, high, array.shape, dtype.type)
    validate_space(space, "env.module: state()")
    return space


def _is_concatenation(state: Any, vectors: Sequence[np.ndarray | None]) -> bool:
    """Return True if a state is the vectors one after another."""
    array = as_array(state)
    return (
        array is not None
        and array.ndim == 1
        and all(vector is not None and vector.ndim == 1 for vector in vectors)
        and np.array_equal(array, np.concatenate(vectors))  # type: ignore[arg-type]
    )
