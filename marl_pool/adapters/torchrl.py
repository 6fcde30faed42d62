"""TorchRL: set networks as actors and critics on tensordicts.

Example::

    actor = ProbabilisticActor(
        SetActor(env.observation_spec, num_outputs=5, pooling="ada"),
        spec=env.action_spec_unbatched,
        in_keys=[("agents", "logits")],
        out_keys=[("agents", "action")],
        distribution_class=Categorical,
        return_log_prob=True,
    )
    critic = SetCritic(env.observation_spec, scope="agents", pooling="ada")
    loss = ClipPPOLoss(actor, critic)
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn
from typing_extensions import override

from marl_pool.adapters.space_network import SpaceNetwork
from marl_pool.evaluation.callable_policy import Act
from marl_pool.finite import require_numbers
from marl_pool.observations.make import is_vector, split_action_mask
from marl_pool.observations.masks import MASK
from marl_pool.observations.view import TokenOptions, listed
from marl_pool.options.signatures import check_argument, options_of
from marl_pool.options.types import PositiveInt
from marl_pool.tokens import TokenSpec
from marl_pool.utils.errors import InputError, explain_missing_modules, first_line

with explain_missing_modules():
    from tensordict import TensorDict
    from tensordict.nn import (
        NormalParamExtractor,
        TensorDictModule,
        TensorDictModuleBase,
        TensorDictSequential,
    )
    from torchrl.data import (
        Binary,
        Categorical,
        Composite,
        MultiCategorical,
        MultiOneHot,
        OneHot,
        TensorSpec,
    )
    from torchrl.envs.utils import ExplorationType, set_exploration_type

Key = str | tuple[str, ...]
"""Key of a tensordict."""
Scope = Literal["agent", "agents", "team"]
"""What a network reads and returns; see `AgentNetwork`."""
Vector = Literal["numbers", "token"]
"""How an observation that is a vector becomes tokens; see `AgentNetwork`."""


class AgentNetwork(nn.Module):
    """A network on agents' observations, with the same weights for each agent.

    A `SpaceNetwork` maps an agent's tokens to a vector. With a scope of several agents,
    a second one, with the same options, maps the set of the agents' vectors to one
    vector for each agent, whose own vector has a separate type, or to one for all. A
    linear layer follows. So the number of agents may change, unless a head depends on
    the number of tokens, and their order does not matter to an invariant head.

    Shapes: the arrays of an observation ``(*B, A, …)``, in the order of `leaf_paths`,
    to ``(*B, A, num_outputs)``, or ``(*B, num_outputs)`` for the scope ``"team"``. The
    scope ``"agent"`` needs no dimension A of agents.

    Args:
        space: of a single agent's observation.
        num_outputs: number of results.
        scope: ``"agent"``, a result for each agent from its own observation;
            ``"agents"``, one for each from all agents' observations; ``"team"``, one
            for all from all agents' observations.
        num_agents: A, for a head that depends on it.
        reads_presence: the last array, ``(*B, A)`` bool, is False for absent agents.
            Their observations may hold anything, even NaN: no other agent's result
            depends on them, and their own results are finite.
        vector: ``"numbers"`` if each number of an observation that is a vector is a
            token, ``"token"`` if the vector is a single one.
        normal: return half of the results as locations, half as positive scales.
        **options: of the `SpaceNetwork`, including `TokenOptions`.

    Raises:
        InputError: as for `SpaceNetwork`.
    """

    def __init__(
        self,
        space: spaces.Space[Any],
        num_outputs: PositiveInt,
        *,
        scope: Scope = "agent",
        num_agents: PositiveInt = 1,
        reads_presence: bool = False,
        vector: Vector = "numbers",
        normal: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        arguments = {"num_outputs": num_outputs, "scope": scope, "vector": vector}
        for key, value in arguments.items():
            check_argument(key, value, options_of(AgentNetwork)[key].annotation)
        space, _ = split_action_mask(space)
        # Dicts of a single entry are unwrapped, since leaves are passed by position.
        while isinstance(space, spaces.Dict) and len(space) == 1:
            space = next(iter(space.values()))
        self.paths = leaf_paths(space)
        self.is_row = vector == "token" and is_vector(space)
        if self.is_row:
            space = _row(space)  # type: ignore[arg-type]
        self.network = SpaceNetwork(space, **options)
        width = self.network.dim_out
        self.scope, self.reads_presence = scope, reads_presence
        self.agents: SpaceNetwork | None = None
        if scope != "agent":
            types = ("self", "agent") if scope == "agents" else ("agent",)
            tokens = TokenSpec(num_agents, width, types).space()
            # Options of tokens apply to the observation's tokens, not to agents.
            tuned = {k: v for k, v in options.items() if k not in TOKEN_OPTIONS}
            self.agents = SpaceNetwork(tokens, token_types=types, **tuned)
            width = self.agents.dim_out
        self.output = nn.Linear(width, num_outputs)
        self.extract: nn.Module = NormalParamExtractor() if normal else nn.Identity()

    @override
    def forward(self, *arrays: Tensor) -> Any:
        """Return results; a pair of locations and scales if ``normal``."""
        leaves = arrays[: len(self.paths)]
        present = arrays[-1] if self.reads_presence else None
        if self.is_row:
            leaves = (leaves[0].unsqueeze(-2),)
        tokens = self.network.tokens(_nest(self.paths, leaves))
        if self.reads_presence:
            present = _presence(present, tuple(tokens.batch_shape))
            # Without tokens, an absent agent has a finite vector, whatever it observes.
            padding = tokens.padding | ~present[..., None]
            tokens = tokens._replace(padding=padding)
        vectors = self.network.network(tokens.flatten_batch())
        vectors = vectors.unflatten(0, tokens.batch_shape)
        if self.agents is not None:
            vectors = self.agents(self._agent_tokens(vectors, present))
        return self.extract(self.output(vectors))

    def _agent_tokens(
        self, vectors: Tensor, present: Tensor | None
    ) -> dict[str, Tensor]:
        """Return agents as tokens, of batch ``(*B, A)``, or ``(*B)`` for a team."""
        shape = vectors.shape[:-1]
        absent = vectors.new_zeros(shape).bool() if present is None else ~present
        types = torch.zeros(shape, dtype=torch.int64, device=vectors.device)
        if self.scope == "agents":
            count = shape[-1]
            vectors = vectors.unsqueeze(-3).expand(*shape, *vectors.shape[-2:])
            absent = absent.unsqueeze(-2).expand(*shape, count)
            # Agent i is "self", type 0, in the set that agent i reads.
            is_other = 1 - torch.eye(count, dtype=torch.int64, device=vectors.device)
            types = is_other.expand(*shape, count)
        return {"features": vectors, "types": types, "padding": absent}


class SetActor(TensorDictModule):
    """A set network from observations to the parameters of agents' distributions.

    All agents share the weights. It is the module of TorchRL's ``ProbabilisticActor``.

    Args:
        observation_spec: ``env.observation_spec``.
        num_outputs: size of each result: the number of logits, or of actions.
        in_key: of the observation, an array or a nested tensordict, such as one of
            ``features``, ``types`` and ``padding``; ``()`` where its entries are at the
            root. The tensordict around it has the dimensions of the batch and of
            agents.
        out_keys: of the results: one of logits, or two of location and scale. None for
            ``logits`` beside the observation.
        vector: see `AgentNetwork`.
        **options: of the `SpaceNetwork`, such as ``pooling="ada"`` and ``presence=0``.

    Raises:
        InputError: an unknown key or option, or a spec that cannot become tokens.
    """

    def __init__(
        self,
        observation_spec: Composite,
        num_outputs: PositiveInt,
        *,
        in_key: Key = ("agents", "observation"),
        out_keys: Sequence[Key] | None = None,
        vector: Vector = "numbers",
        **options: Any,
    ) -> None:
        prefix = _path(in_key)
        space = _observation_space(observation_spec, prefix)
        keys = [(*prefix[:-1], "logits")] if out_keys is None else [*out_keys]
        if len(keys) not in (1, 2):
            raise InputError(
                "out_keys: expected one of logits or two of location and scale, got "
                f"{keys}"
            )
        network = AgentNetwork(
            space,
            num_outputs * len(keys),
            vector=vector,
            normal=len(keys) == 2,
            **options,
        )
        super().__init__(network, in_keys=_keys(prefix, space), out_keys=keys)


class SetCritic(TensorDictModule):
    """A set network from observations to the values of all agents, ``(*B, A, 1)``.

    A critic of the scope ``"agents"`` reads the set of all agents' observations, for
    any number of agents, and one of the scope ``"agent"`` each agent's only: MAPPO and
    IPPO.

    Args:
        observation_spec: ``env.observation_spec``.
        scope: see `AgentNetwork`; values of a ``"team"`` are ``(*B, 1)``.
        in_key: see `SetActor`.
        out_key: of the values; None for ``state_value`` beside the observation, or
            beside the agents for a team.
        present_key: of a bool for each agent, False for absent ones, such as
            ``("agents", "mask")`` of TorchRL's PettingZoo environments; None if all are
            present.
        vector: see `AgentNetwork`.
        **options: of the `SpaceNetwork`s.

    Raises:
        InputError: an unknown key or option, or a spec that cannot become tokens; from
            the critic, data without bools at ``present_key``.
    """

    def __init__(
        self,
        observation_spec: Composite,
        *,
        scope: Scope = "agents",
        in_key: Key = ("agents", "observation"),
        out_key: Key | None = None,
        present_key: Key | None = None,
        vector: Vector = "numbers",
        **options: Any,
    ) -> None:
        prefix = _path(in_key)
        space = _observation_space(observation_spec, prefix)
        around = _around(observation_spec, prefix)
        if scope != "agent" and not around.shape:
            raise InputError(
                f"scope: expected agent, since {in_key!r} has no dimension of agents, "
                f"got {scope}"
            )
        network = AgentNetwork(
            space,
            1,
            scope=scope,
            num_agents=around.shape[-1] if scope != "agent" else 1,
            reads_presence=present_key is not None,
            vector=vector,
            **options,
        )
        if out_key is None:
            place = prefix[:-2] if scope == "team" else prefix[:-1]
            out_key = (*place, "state_value")
        in_keys = _keys(prefix, space)
        if present_key is not None:
            in_keys.append(present_key)
        super().__init__(network, in_keys=in_keys, out_keys=[out_key])


def as_policy(actor: TensorDictModuleBase) -> Act:
    """Return a trained actor as a policy for `marl_pool.evaluate`.

    It chooses the most likely actions. An in_key such as ``("agents", "observation",
    "cars")`` reads the entry of the environment's observation that the longest suffix
    of its path names, or all of an observation that is an array.

    Example:
        >>> marl_pool.evaluate(as_policy(actor), env="simple_centroid")

    Args:
        actor: a ``ProbabilisticActor`` of a `SetActor`. Its distribution has the bounds
            of a single agent.

    Raises:
        InputError: no actor, or one without actions; from the policy, an observation
            without what the actor reads, or whose numbers give NaN.
    """
    if not isinstance(actor, TensorDictModuleBase):
        raise InputError(
            "actor: expected a ProbabilisticActor of a SetActor, got "
            f"{type(actor).__name__}"
        )
    actions = [key for key in actor.out_keys if _path(key)[-1] == "action"]
    if not actions:
        raise InputError(
            f"actor: expected an out_key action, got {listed(actor.out_keys)}"
        )
    spec = getattr(actor, "spec", {actions[0]: None})[actions[0]]
    device = next(actor.parameters()).device
    # Keys of the distribution's parameters.
    read = actor[-1].in_keys if isinstance(actor, TensorDictSequential) else ()

    def act(observation: Any) -> np.ndarray:
        arrays = {key: _entry(observation, _path(key)) for key in actor.in_keys}
        batch = TensorDict({}, [len(next(iter(arrays.values())))], device=device)
        for key, array in arrays.items():
            batch[key] = torch.as_tensor(array)
        deterministic = set_exploration_type(ExplorationType.DETERMINISTIC)
        with torch.no_grad(), deterministic, _evaluating(actor):
            try:
                outputs = actor(batch)
            except InputError as error:
                # TensorDict adds the number of the module that failed.
                raise InputError(first_line(error)) from error
        action = outputs[actions[0]]
        for part in (action, *map(outputs.get, read)):
            require_numbers(part)
        if isinstance(spec, OneHot | MultiOneHot):
            action = spec.to_categorical(action)
        result: np.ndarray = action.cpu().numpy()
        return result

    return act


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Put a module and its parts in evaluation mode, without dropout, for a block."""
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes.items():
            part.training = mode


def _presence(present: Tensor | None, shape: tuple[int, ...]) -> Tensor:
    """Return the agents' presence, bools of ``shape``."""
    if present is None:  # TensorDict passes None for a missing key
        actual = "no such entry"
    elif present.dtype == torch.bool and present.shape == shape:
        return present
    else:
        actual = f"{present.dtype} of shape {tuple(present.shape)}"
    raise InputError(
        f"present_key: expected an entry of bools of shape {shape}, one for each "
        f"agent, got {actual}"
    )


def _entry(observation: Any, path: tuple[str, ...]) -> np.ndarray:
    """Return an observation's array at the longest suffix of a path."""
    for start in range(len(path)):
        entry = observation
        for name in path[start:]:
            entry = entry.get(name) if isinstance(entry, Mapping) else None
        if isinstance(entry, np.ndarray):
            return entry
    if isinstance(observation, np.ndarray) and path[-1] != MASK:
        return observation
    entries = listed([*observation]) if isinstance(observation, Mapping) else "an array"
    raise InputError(
        f"actor: expected an observation with an array for {path}, got {entries}"
    )


def observation_space(spec: TensorSpec, dims: int = 0) -> spaces.Space[Any]:
    """Return the Gymnasium space of a TorchRL spec.

    Args:
        spec: of arrays, or a Composite of them.
        dims: number of leading dimensions, of the batch and of agents, to leave out.

    Raises:
        InputError: agents with different specs.
    """
    # A stack of specs with unequal sizes has the size -1.
    if -1 in spec.shape:
        raise InputError(
            "observation_spec: expected equal specs of all agents of a group, got "
            f"shape {tuple(spec.shape)}"
        )
    shape, first = tuple(spec.shape[dims:]), (0,) * dims
    match spec:
        case Composite():
            return spaces.Dict(
                {key: observation_space(part, dims) for key, part in spec.items()}
            )
        case MultiCategorical():
            return spaces.MultiDiscrete(spec.nvec.expand(spec.shape)[first].numpy())
        case Binary() | OneHot() | MultiOneHot():  # a Binary is a Categorical, too
            return spaces.MultiBinary(shape)
        case Categorical() if spec.dtype != torch.bool:
            count = spec.space.n
            return (
                spaces.MultiDiscrete(np.full(shape, count))
                if shape
                else spaces.Discrete(count)
            )
    if spec.dtype == torch.bool:
        return spaces.MultiBinary(shape)
    low, high = (
        bound.expand(spec.shape)[first].cpu().numpy()
        for bound in (spec.space.low, spec.space.high)
    )
    return spaces.Box(low, high, shape, low.dtype.type)


def leaf_paths(space: spaces.Space[Any]) -> list[tuple[str, ...]]:
    """Return the paths of keys to the arrays inside an observation, ``()`` for one."""
    if not isinstance(space, spaces.Dict):
        return [()]
    return [(key, *path) for key, part in space.items() for path in leaf_paths(part)]


TOKEN_OPTIONS = frozenset(options_of(TokenOptions))
"""Names of the options of tokens, as opposed to networks."""


def _observation_space(spec: Composite, prefix: tuple[str, ...]) -> spaces.Space[Any]:
    """Return the space of a single agent's observation at a key."""
    if not isinstance(spec, Composite):
        raise InputError(
            "observation_spec: expected a Composite, such as env.observation_spec, got "
            f"{type(spec).__name__}"
        )
    if not isinstance(prefix, tuple):
        raise InputError(
            f"in_key: expected a string or a tuple of strings, got {prefix!r}"
        )
    try:
        around = _around(spec, prefix)
        part = around[prefix[-1]] if prefix else spec
    except KeyError:
        raise InputError(
            f"in_key: expected one of {listed([*spec.keys(True)])}, got {prefix}"
        ) from None
    return split_action_mask(observation_space(part, len(around.shape)))[0]


def _around(spec: Composite, prefix: tuple[str, ...]) -> Composite:
    """Return the spec of the tensordict that holds a key."""
    # The empty path is no key of a Composite.
    return spec[prefix[:-1]] if prefix[:-1] else spec


def _path(key: Key) -> tuple[str, ...]:
    return (key,) if isinstance(key, str) else key


def _keys(prefix: tuple[str, ...], space: spaces.Space[Any]) -> list[Key]:
    return [(*prefix, *path) for path in leaf_paths(space)]


def _nest(paths: Sequence[tuple[str, ...]], leaves: Sequence[Tensor]) -> Any:
    """Return the observation with the arrays ``leaves`` at ``paths``."""
    if paths == [()]:
        return leaves[0]
    nested: dict[str, Any] = {}
    for (*outer, name), leaf in zip(paths, leaves, strict=True):
        place = nested
        for key in outer:
            place = place.setdefault(key, {})
        place[name] = leaf
    return nested


def _row(space: spaces.Box | spaces.MultiBinary) -> spaces.Space[Any]:
    """Return the space of a vector as a matrix of one row."""
    if isinstance(space, spaces.MultiBinary):
        return spaces.MultiBinary((1, *space.shape))
    return spaces.Box(space.low[None], space.high[None], dtype=space.low.dtype.type)
