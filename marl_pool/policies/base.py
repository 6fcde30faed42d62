"""Base classes of policies: one contract, recurrent or not."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from typing_extensions import override

from marl_pool.options.construction import check_constructor
from marl_pool.options.names import short_name
from marl_pool.policies.actions import ActionSpec
from marl_pool.pooling.base import Memory
from marl_pool.tokens import Tokens, TokenSpec, form_of
from marl_pool.utils.errors import InputError
from marl_pool.utils.randomness import Stream

State = Any
"""State of a policy: a pytree of tensors ``(num_envs, agents, …)``, or () for none."""


class Decision(NamedTuple):
    """Result of a policy; ``B`` are the tokens' batch dimensions."""

    action: Tensor
    """``(*B, A)``, before `Policy.scale`, or ``(*B,)`` int64; see `ActionSpec`."""
    log_prob: Tensor
    """``(*B,)`` log-probability of ``action``."""
    value: Tensor
    """``(*B,)`` estimated return; 0 for a policy without a value head."""
    logits: Tensor
    """``(*B, L)`` parameters of the action distribution."""
    state: State
    """State for the next call."""


class Policy(nn.Module, ABC):
    """A map from tokens to actions.

    Whatever it carries from step to step is returned in `Decision.state` and passed to
    the next call, so that one policy can act in any number of environments, and a
    learner can replay any step. Implement `act`, and `initial_state` for a policy with
    a state.

    The action is in the policy's own units, and `scale` converts it to the
    environment's. It is sampled by inverting the distribution function at numbers of
    the stream, so an action depends on no other row of the batch. A policy is saved as
    JSON and safetensors, and loading it runs no code: see docs/security.md.
    """

    noise_size: int = 0
    """Number of uniform random numbers that exploration consumes per decision."""

    @abstractmethod
    def act(
        self,
        tokens: Tokens,
        state: State = (),
        generator: Stream | None = None,
        explore: bool = False,
    ) -> Decision:
        """Choose an action for every agent of the batch.

        Args:
            tokens: observations, batch dimensions ``B = (num_envs, agents)``.
            state: from `initial_state` or the last `Decision`.
            generator: random stream of ``agents * noise_size`` numbers per environment,
                or None for torch's global generator.
            explore: sample from the action distribution; otherwise take its mode.
        """

    def initial_state(self, num_envs: int, num_agents: int, num_tokens: int) -> State:
        """Return the state at an episode's start; () for a policy without one."""
        return ()

    def newborn_state(
        self, state: State, num_envs: int, num_agents: int, num_tokens: int
    ) -> State:
        """Return the state of agents that are born in mid-episode.

        ``state`` is the present one; by default it is as at an episode's start.
        """
        return self.initial_state(num_envs, num_agents, num_tokens)

    def value(self, tokens: Tokens, state: State = ()) -> Tensor:
        """Estimate the returns ``(*B,)`` of observations without choosing an action."""
        return self.act(tokens, state).value

    def scale(self, action: Tensor) -> Tensor:
        """Map actions from the policy's units to the action space's."""
        return action

    def attention_weights(self, tokens: Tokens, state: State = ()) -> Tensor | None:
        """Return the weights of the tokens, ``(*B, heads, N)``; None without any."""
        return None

    def latent(self, tokens: Tokens, state: State = ()) -> Tensor | None:
        """Return the output of a sensory layer, ``(*B, C)``; None without one."""
        return None

    def noise(self, tokens: Tokens, generator: Stream | None) -> Tensor:
        """Sample ``(*B, noise_size)`` uniform numbers in (0, 1)."""
        shape = (*tokens.batch_shape, self.noise_size)
        if isinstance(generator, Stream):
            return generator.next().view(shape)
        if generator is not None:
            raise InputError(
                f"generator: expected a Stream or None, got {form_of(generator)}"
            )
        # At 0 and 1 the inverse of a distribution function may be infinite.
        eps = torch.finfo(torch.float32).eps
        return torch.rand(shape, device=tokens.types.device).clamp(eps, 1 - eps)


class SpecifiedPolicy(Policy):
    """A policy for the tokens and actions of one group of agents, recurrent or not.

    It can be saved, see `marl_pool.policies.storage`: `config` and the parameters
    determine it completely.

    Where `recurrent` is True it depends on the previous action and on a memory. Its
    state is then ``{"action", "memory"}``, with leading dimensions ``(num_envs,
    agents)``: the previous action as a vector ``(…, A)``, see `ActionSpec.to_vectors`,
    zeros at an episode's start; and the pytree of `initial_memory`. Otherwise the state
    is (). A subclass computes whole sequences, since learners backpropagate through
    many steps at once. Acting is a sequence of one step, for which `single_step` and
    `next_state` convert states to arguments and back.

    Args:
        spec: sizes and types of the tokens.
        action_space: a space that `ActionSpec.of` accepts.
        **options: other keyword arguments of the subclass's constructor, JSON-ready.

    Attributes:
        config: keyword arguments of the constructor, JSON-ready. A subclass of a policy
            that does not pass on its options adds them after ``super().__init__``.
        low: lower bounds of the Box; empty without one. ``high``: the upper.
    """

    low: Tensor
    high: Tensor

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_constructor(cls, "policy")

    def __init__(
        self, spec: TokenSpec, action_space: spaces.Space | ActionSpec, **options: Any
    ) -> None:
        super().__init__()
        self.spec = spec
        self.actions = ActionSpec.of(action_space)
        self.config: dict[str, Any] = {
            "spec": spec.to_json(),
            "action_space": self.actions.to_json(),
            # The caller may change nested lists: copy containers, not their contents.
            **tree_map(lambda option: option, options),
        }
        for name in ("low", "high"):
            bounds = torch.tensor(getattr(self.actions, name), dtype=torch.float32)
            # Not saved with the weights, since the config determines them.
            self.register_buffer(name, bounds, persistent=False)

    def part_name(self, part: str) -> str:
        """Return the name of ``"pooling"`` or ``"encoder"``; empty without one."""
        options = self.config.get(part)
        return str(options["name"]) if isinstance(options, Mapping) else ""

    @property
    def recurrent(self) -> bool:
        """True if decisions depend on the previous action and the memory."""
        return False

    def initial_memory(self, batch: int, num_tokens: int) -> Memory:
        """Return the memory ``(batch, …)`` at an episode's start; () for none."""
        return ()

    def to_save(self) -> "SpecifiedPolicy":
        """Return the policy to save; for a compiled one, the original."""
        return self

    @override
    def initial_state(self, num_envs: int, num_agents: int, num_tokens: int) -> State:
        if not self.recurrent:
            return ()
        shape = (num_envs, num_agents)
        # Networks keep the memory of all agents of all environments in one dimension.
        memory = self.initial_memory(num_envs * num_agents, num_tokens)
        action = self.low.new_zeros(*shape, self.actions.dim)
        return {"action": action, "memory": _unflatten(memory, shape)}

    def single_step(
        self, tokens: Tokens, state: State
    ) -> tuple[Tokens, Tensor, Memory]:
        """Return one step of a batch, ``rows`` in all, as sequences of length 1.

        These are tokens of batch ``(rows, 1)``, the previous action ``(rows, 1, A)``
        and the memory ``(rows, …)``; the state () marks an episode's start.
        """
        rows = math.prod(tokens.batch_shape)  # `numel` would fix the size of an export
        if state:
            last = len(tokens.batch_shape) - 1
            flat = tree_map(lambda tensor: tensor.flatten(0, last), state)
            prev_action, memory = flat["action"], flat["memory"]
        else:
            prev_action = self.low.new_zeros(rows, self.actions.dim)
            memory = self.initial_memory(rows, tokens.num_tokens)
        sequences = tokens.flatten_batch().map(lambda tensor: tensor[:, None])
        return sequences, prev_action[:, None], memory

    def next_state(self, action: Tensor, memory: Memory, dtype: torch.dtype) -> State:
        """Return the state after a step with the executed action and the memory."""
        if not self.recurrent:
            return ()
        vectors = self.actions.to_vectors(action).to(dtype)
        return {"action": vectors, "memory": _unflatten(memory, vectors.shape[:-1])}

    def mismatch(self, spec: TokenSpec, action_space: spaces.Space | ActionSpec) -> str:
        """Return the reason why the policy does not fit these spaces; empty if it does.

        The number of tokens may differ if the pooling head supports it.
        """
        # No policy depends on attributes that only describe the tokens.
        free = ("num_tokens", "signal_types", "positions", "num_frames", "markers")
        expected = {**vars(spec), "actions": ActionSpec.of(action_space)}
        actual = {**vars(self.spec), "actions": self.actions}
        for key, value in expected.items():
            if key not in free and actual[key] != value:
                return f"expected {key} = {value}, got {actual[key]}"
        return ""

    @override
    def scale(self, action: Tensor) -> Tensor:
        """Map [-1, 1] to the bounds of a Box; choices are returned as they are."""
        if self.actions.integral:
            return action
        count = len(self.actions.choices)
        numbers = action[..., count:] if count else action
        scaled = self.low + (numbers + 1) * ((self.high - self.low) / 2)
        return torch.cat([action[..., :count], scaled], -1) if count else scaled


class SequencePolicy(SpecifiedPolicy):
    """A policy that can be cloned: it decides on whole sequences at once."""

    @abstractmethod
    def unroll_logits(
        self, tokens: Tokens, prev_action: Tensor, memory: Memory
    ) -> tuple[Tensor, Memory]:
        """Compute the logits that `act` decides by, for B sequences of T steps.

        Args:
            tokens: of batch ``(B, T)``.
            prev_action: ``(B, T, A)``, the action before each step, as
                `ActionSpec.to_vectors` returns it; zeros at an episode's start.
            memory: ``(B, …)`` before the first step; see `initial_memory`.

        Returns:
            ``(B, T, L)``, not masked: the parameters of the action distribution, or for
            a deterministic policy a logit for each option of the choices, then the
            numbers of a Box in [-1, 1]; and the memory after the last step.
        """

    def options(self, tokens: Tokens) -> Tensor | None:
        """Return which options may be chosen, ``(*B, L)`` bool; None if all may.

        Raises:
            InputError: an action mask of another shape or dtype.
        """
        return self.actions.mask_of(tokens)


def _unflatten(memory: Memory, shape: tuple[int, ...]) -> Any:
    return tree_map(lambda tensor: tensor.unflatten(0, shape), memory)


def head_name(policy: Policy) -> str:
    """Return the name of a policy's pooling head, or of its class without one."""
    name = policy.part_name("pooling") if isinstance(policy, SpecifiedPolicy) else ""
    return short_name(name or type(policy).__name__)
